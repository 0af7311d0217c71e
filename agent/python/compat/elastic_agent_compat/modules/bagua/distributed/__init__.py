"""Found where the package of this name is not installed: a name for elastic-agent."""
