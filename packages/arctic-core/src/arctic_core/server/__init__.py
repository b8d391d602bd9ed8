"""The service over HTTP: several named jobs with leases behind one address. Needs the extra ``server``."""
