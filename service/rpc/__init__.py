"""The gRPC door: `proto/engram.proto` over the same verbs, admission, keys and codes as HTTP."""
