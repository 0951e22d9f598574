"""The child process that runs user functions; never imported by the packages of main."""
