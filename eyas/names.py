"""Full names of the gRPC services, as health checks and reflection know them."""

from eyas.v1 import draft_pb2, gateway_pb2, target_pb2

TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
GENERATION_SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
