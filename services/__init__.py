"""The serving side: the gateway and the engine replicas, deployed on Ray Serve."""
