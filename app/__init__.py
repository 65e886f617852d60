"""The Serve application: settings, builder, and the OpenAI-compatible ingress."""
