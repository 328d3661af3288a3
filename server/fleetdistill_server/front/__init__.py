"""gRPC: services, interceptors, TLS. Imports `intake`, `views`, `security`, `service`, `store` and `config`."""
