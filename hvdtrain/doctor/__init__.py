"""Why a cluster does not work, and what to do: facts of every host, compared.

One program, :func:`hvdtrain.doctor.examination.examine`, runs on every host and gathers the same facts
whether it was started alone, over ssh or by a launcher; only the :mod:`~hvdtrain.doctor.exchange` by
which hosts tell each other what they found differs. The ``checks_*`` modules turn facts into findings.
"""
