"""The main process's end of the executor sockets; runs on the reactor of the actor thread."""
