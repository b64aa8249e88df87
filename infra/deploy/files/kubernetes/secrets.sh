#!/bin/sh
# Creates the Secrets of this run: secrets.sh FOLDER [kubectl options]
# FOLDER has the files of relays and gateway (python -m infra.certificates FOLDER [HOST...]); with
# authentication also each Kafka user's USER.properties.
set -eu
folder=${1:?the folder of the files}
shift
cd "$folder"
kubectl create secret generic laminar-deployed-relay-files --namespace laminar --from-file=relay-token --from-file=relay.pem --from-file=ca.pem "$@"
