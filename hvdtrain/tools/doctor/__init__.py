"""The doctor: find out why a cluster does not work, and what to do about it.

Every host runs the same function, :func:`hvdtrain.tools.doctor.collect.collect`, whether the doctor was
started alone, over ssh or by a launcher; only the transport that carries the hosts' answers differs.
The ``checks_*`` modules compare the answers of all hosts and return findings.
"""
