"""The gRPC server: services, interceptors and TLS.

Modules of this package may import `intake`, `views`, `security`, `service`, `store` and `config`.
"""
