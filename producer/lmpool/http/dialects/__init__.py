"""The protocols of the gateway, one file each, with the routes, requests and responses of a protocol."""
