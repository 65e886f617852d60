"""The gRPC front: messages and service as generated from inference.proto, and their ways to and from the app's own.

`inference_pb2.py`, `inference_pb2.pyi` and `inference_pb2_grpc.py` are generated: `make proto`.
"""
