"""mTLS for gRPC: who may connect, and who it was.

Both sides hold a leaf under the swarm's CA. A member could mint a leaf with another member's name, so the name alone
proves nothing:

- the server recomputes the id from the key in the client's certificate (`peer_id`) and refuses a name that differs;
- a client cannot see the server's certificate through grpc. It dials with the expected id as the name that must be in
  the certificate, and what convinces it in the end is the signature in `Describe` and in the manifest. Who wants more
  pins: `pinned_root` fetches the server's leaf, checks its key against the id, and that leaf becomes the only root.

There is no plaintext mode.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Container, Iterable, Mapping

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from hotswarm.errors import NotAuthorised, PeerMisbehaved, PeerUnavailable
from hotswarm.ids import NodeId
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.swarmkey import COMMON_NAME, Membership, leaf_id


class SwarmTls:
    """This node's credentials. `banned` and `allowed` are the operator's lists; `allowed` None means every member."""

    def __init__(
        self,
        identity: NodeIdentity,
        membership: Membership,
        *,
        banned: Container[str] = (),
        allowed: Container[str] | None = None,
    ) -> None:
        self._key_pem = identity.private_pem
        self._leaf_pem = membership.leaf_pem
        self._roots_pem = membership.roots_pem
        self.banned = banned
        self.allowed = allowed

    def server_credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`: a client without a leaf of this swarm gets no further than the handshake."""
        return grpc.ssl_server_credentials(
            [(self._key_pem, self._leaf_pem)], root_certificates=self._roots_pem, require_client_auth=True
        )

    def channel_credentials(self, root_pem: bytes | None = None) -> grpc.ChannelCredentials:
        """For `secure_channel`; `root_pem` (from `pinned_root`) instead of the swarm's roots."""
        return grpc.ssl_channel_credentials(root_pem or self._roots_pem, self._key_pem, self._leaf_pem)

    @staticmethod
    def channel_options(expected: NodeId | None) -> list[tuple[str, str]]:
        """Options that make the server's certificate bear this id, or, when None, only be of this swarm."""
        return [("grpc.ssl_target_name_override", expected or COMMON_NAME)]

    def peer_id(self, auth_context: Mapping[str, Iterable[bytes]]) -> NodeId:
        """The proven id of the client behind `context.auth_context()`.

        NotAuthorised (answer PERMISSION_DENIED) when the certificate's name is not its key's hash, or the id is banned.
        """
        pem = next(iter(auth_context.get("x509_pem_cert", ())), b"")
        try:
            node_id = leaf_id(x509.load_pem_x509_certificate(pem))
        except ValueError as e:
            raise NotAuthorised("the client showed no readable certificate") from e
        if node_id is None:
            raise NotAuthorised("the client's certificate bears a name that is not its key's hash")
        if node_id in self.banned or (self.allowed is not None and node_id not in self.allowed):
            raise NotAuthorised(f"node {node_id} is not allowed on this node")
        return node_id

    async def pinned_root(self, host: str, port: int, expected: NodeId, timeout_s: float = 5.0) -> bytes:
        """Fetch the server's leaf and return it (PEM) as the only root to trust for `expected`.

        PeerUnavailable when nobody answers; PeerMisbehaved when a member answers under another key.
        """
        try:
            der = await asyncio.wait_for(self._fetch_leaf(host, port), timeout_s)
        except (OSError, TimeoutError) as e:
            raise PeerUnavailable(f"{host}:{port} did not show its certificate: {e or 'timeout'}", expected) from e
        leaf = x509.load_der_x509_certificate(der)
        if leaf_id(leaf) != expected:
            raise PeerMisbehaved(expected, f"{host}:{port} shows a certificate that is not from the key of that id")
        return leaf.public_bytes(serialization.Encoding.PEM)

    async def _fetch_leaf(self, host: str, port: int) -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self._roots_pem.decode("ascii"))
        context.check_hostname = False  # the id is checked below, against the key itself
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        finally:
            writer.close()
        if not der:
            raise OSError("no certificate")
        return bytes(der)
