"""The scale sub-resource of a Kubernetes StatefulSet: the API server is asked with the pod's service account."""

from __future__ import annotations

import json
import os
import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from infra.http_client import patch_json
from operators.autoscaler.actuators import ActuatorFailed
from schemas.records import ScalingDecision

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the token and the certificate authority of its service account."""
MAX_BODY = 64 * 1024


@dataclass(frozen=True)
class StatefulSetScale:
    """The number of pods of StatefulSet `stateful_set`. The highest numbers end first, as with the local fleet.

    `server` is the API server's address, by default that in the environment of a pod.
    """

    namespace: str
    stateful_set: str
    server: str = ""
    account: Path = ACCOUNT
    name: str = "kubernetes"

    def apply(self, decision: ScalingDecision, machines: Sequence[str], timeout_s: float) -> None:
        """Set the number of replicas to the target: Kubernetes chooses the machines. Raises ActuatorFailed."""
        path = f"/apis/apps/v1/namespaces/{self.namespace}/statefulsets/{self.stateful_set}/scale"
        try:
            token = (self.account / "token").read_text().strip()  # Kubernetes renews it from time to time
        except OSError as error:
            raise ActuatorFailed(
                f"there is no service account in {self.account} ({error.strerror}): the autoscaler must run in a pod "
                "of the cluster, with the ServiceAccount that `laminar deploy` writes"
            ) from error
        body = {"spec": {"replicas": decision.target}}
        try:
            with patch_json(self._server() + path, token, body, timeout_s, str(self.account / "ca.crt")) as response:
                response.read(MAX_BODY)
        except urllib.error.HTTPError as error:
            with error:
                raise ActuatorFailed(self._refusal(error)) from error
        except (OSError, HTTPException, ValueError) as error:
            raise ActuatorFailed(f"the Kubernetes API server {self._server()} does not respond: {error}") from error

    def _server(self) -> str:
        if self.server:
            return self.server
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ActuatorFailed("KUBERNETES_SERVICE_HOST is not set: the autoscaler must run in a pod of the cluster")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        """The API server's reason, and what to do about it."""
        what = f"Kubernetes refuses to scale StatefulSet {self.stateful_set} in {self.namespace}: {error.code}"
        try:
            reason = json.loads(error.read(MAX_BODY))["message"]
        except (ValueError, KeyError, TypeError, OSError, HTTPException):
            reason = error.reason
        advice = {
            401: "; is the service account's token valid?",
            403: "; its Role needs the verb patch on statefulsets/scale, as `laminar deploy` writes it",
            404: "; see autoscaling.kubernetes_name and deploy.namespace",
        }
        return f"{what} {reason}{advice.get(error.code, '')}"
