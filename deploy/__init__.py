"""How the parts are composed, configured and started."""
