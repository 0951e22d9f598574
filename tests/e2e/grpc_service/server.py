"""The server of ``prices.proto``, a process of its own: prints its port and serves until stdin closes."""

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import prices_pb2 as pb
import prices_pb2_grpc


class Prices(prices_pb2_grpc.PricesServicer):
    """The price of a symbol is 2 to the power of the block; there is none for ``none``."""

    asked = 0

    def Price(self, request, context):  # noqa: N802 - the method's name in the .proto
        self.asked += 1
        if request.symbol == "none":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such symbol")
        return pb.PriceReply(wei=str(2**request.block), asked=self.asked)


server = grpc.server(ThreadPoolExecutor(1))
prices_pb2_grpc.add_PricesServicer_to_server(Prices(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
sys.stdout.write(f"{port}\n")
sys.stdout.flush()
sys.stdin.read()
server.stop(None)
