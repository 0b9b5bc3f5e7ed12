"""What Sphinx needs besides its own parts to build the site: each module is one extension or the data of one."""
