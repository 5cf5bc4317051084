"""A process of a site that fetches each chunk of a version once for all its robots."""
