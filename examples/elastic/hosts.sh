#!/bin/sh
# A host discovery script for an elastic job: prints the hosts that the job may use now, one host:slots a line.
#
#     horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script examples/elastic/hosts.sh python -m hvdtrain ...
#
# The launcher runs it once a second. This one prints the file hosts.txt (or $HVDTRAIN_HOSTS), with lines such as
# "host1:2". Edit the file while the job runs: workers start in new slots, and leave the hosts that are removed.
# Write the new list beside it and rename it, so that no run sees half of it:
#
#     printf 'host1:2\nhost3:2\n' >hosts.new && mv hosts.new hosts.txt
exec cat "${HVDTRAIN_HOSTS:-hosts.txt}"
