"""From weights to a version on its way: encoded and checked in a thread, uploaded as far as the gateway has it not."""
