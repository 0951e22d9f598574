"""The messages of the table store over gRPC, generated from ``blockdb.proto`` (see CONTRIBUTING, "the .proto")."""
