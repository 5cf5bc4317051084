"""Policy versions on their way to whoever runs them: fetched in parts, rebuilt, checked whole."""
