"""Text generation APIs: request bodies, response bodies and streams of each API family."""
