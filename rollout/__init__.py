"""What crosses between the processes of Nightshift: records, codec, queue, weights and client; no framework."""
