"""The collectives of a Communicator: arguments checked, calls compared between ranks, run by a transport, observed."""
