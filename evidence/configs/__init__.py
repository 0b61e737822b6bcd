"""One file a campaign, each with a `get_config`."""
