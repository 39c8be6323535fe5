"""The import path of the public repositories: wan.modules.attention."""
