"""The one thread that owns the dispatcher core and the executor sockets: events in, effects out."""
