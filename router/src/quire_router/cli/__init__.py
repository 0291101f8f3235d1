"""The commands of routers: `quire route`, and `quire serve --replicas`."""
