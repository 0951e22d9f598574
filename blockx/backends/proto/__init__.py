"""The messages of the table store over gRPC, made from ``blockdb.proto`` by ``make proto``."""
