"""The computations behind `rlreplay.scores`: a dense reference and one module for each backend."""
