"""What all services share: the contract's stubs, configuration, the gRPC bootstrap, telemetry, the command."""

import os

# gRPC's C core tells of every connection that goes away; our own log lines say what of it matters.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
