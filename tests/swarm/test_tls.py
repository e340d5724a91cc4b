from __future__ import annotations

import asyncio
from typing import Self

import grpc
import pytest
from cryptography.hazmat.primitives import serialization

from hotswarm.errors import NotAuthorised, PeerMisbehaved, PeerUnavailable
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.swarmkey import Membership, SwarmKey, issue_leaf
from hotswarm.swarm.tls import SwarmTls
from support.dhtkit import LOOPS, run

KEY, OTHER = SwarmKey(bytes(range(32))), SwarmKey(bytes(32))
REFUSED = grpc.StatusCode.UNAVAILABLE  # the handshake fails; grpc knows no better word for it


def tls(identity: NodeIdentity, *keys: SwarmKey, **lists) -> SwarmTls:
    return SwarmTls(identity, Membership.from_keys(keys or (KEY,), identity), **lists)


def impostor(claim: str) -> SwarmTls:
    """A member with a leaf in another's name."""
    identity = NodeIdentity.generate()
    leaf = issue_leaf(KEY.ca_key, KEY.ca_cert, identity.public, claim=claim)
    pem = leaf.public_bytes(serialization.Encoding.PEM)
    roots = KEY.ca_cert.public_bytes(serialization.Encoding.PEM)
    return SwarmTls(identity, Membership(roots, pem, (KEY.udp_key,), (KEY.run_secret,)))


class WhoAmI(grpc.GenericRpcHandler):
    """Answers each call with the id that the server has proven for its caller."""

    def __init__(self, server_tls: SwarmTls) -> None:
        self.tls = server_tls

    def service(self, handler_call_details):
        async def answer(request, context):
            try:
                return self.tls.peer_id(context.auth_context()).encode()
            except NotAuthorised as e:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(e))

        return grpc.unary_unary_rpc_method_handler(answer)


class Serving:
    def __init__(self, server_tls: SwarmTls) -> None:
        self.tls = server_tls

    async def __aenter__(self) -> Self:
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self.server.add_generic_rpc_handlers((WhoAmI(self.tls),))
        self.port = self.server.add_secure_port("127.0.0.1:0", self.tls.server_credentials())
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)

    async def call(self, credentials, options) -> str | grpc.StatusCode:
        async with grpc.aio.secure_channel(f"127.0.0.1:{self.port}", credentials, options) as channel:
            try:
                return (await channel.unary_unary("/s/WhoAmI")(b"", timeout=10)).decode()
            except grpc.aio.AioRpcError as e:
                return e.code()

    async def as_(self, client: SwarmTls, expected: str | None, root: bytes | None = None):
        return await self.call(client.channel_credentials(root), client.channel_options(expected))


@pytest.mark.parametrize("loop", LOOPS)
def test_members_know_each_other_and_nobody_else_gets_in(loop):
    async def main():
        server, a, b, outsider = (NodeIdentity.generate() for _ in range(4))
        async with Serving(tls(server)) as s:
            assert await s.as_(tls(a), server.node_id) == a.node_id
            assert await s.as_(tls(a), None) == a.node_id, "an address without a known id"
            assert await s.as_(tls(a), b.node_id) == REFUSED, "another id was expected there"
            assert await s.as_(tls(outsider, OTHER), server.node_id) == REFUSED, "does not trust this swarm's root"
            ours = KEY.ca_cert.public_bytes(serialization.Encoding.PEM)
            assert await s.as_(tls(outsider, OTHER), server.node_id, ours) == REFUSED, "its leaf is of another swarm"
            bare = grpc.ssl_channel_credentials(ours)
            assert await s.call(bare, SwarmTls.channel_options(None)) == REFUSED, "no client certificate"

    run(loop, main())


def test_a_leaf_in_anothers_name_is_denied_to_a_client_and_found_out_by_a_pin():
    async def main():
        server, a = NodeIdentity.generate(), NodeIdentity.generate()
        async with Serving(tls(server)) as s:
            assert await s.as_(impostor(a.node_id), server.node_id) == grpc.StatusCode.PERMISSION_DENIED
            root = await tls(a).pinned_root("127.0.0.1", s.port, server.node_id)
            assert await s.as_(tls(a), server.node_id, root) == a.node_id
        async with Serving(impostor(server.node_id)) as fake:
            # The roots alone do not tell: that is why manifests and Describe are signed with the identity key.
            assert await fake.as_(tls(a), server.node_id) == a.node_id
            assert await fake.as_(tls(a), server.node_id, root) == REFUSED
            with pytest.raises(PeerMisbehaved, match="not from the key"):
                await tls(a).pinned_root("127.0.0.1", fake.port, server.node_id)

    asyncio.run(main())


def test_banned_and_not_allowed_ids_are_denied():
    async def main():
        server, a, b = (NodeIdentity.generate() for _ in range(3))
        banned: set[str] = set()
        async with Serving(tls(server, banned=banned)) as s:
            assert await s.as_(tls(b), server.node_id) == b.node_id
            banned.add(b.node_id)
            assert await s.as_(tls(b), server.node_id) == grpc.StatusCode.PERMISSION_DENIED
            assert await s.as_(tls(a), server.node_id) == a.node_id
        async with Serving(tls(server, allowed={a.node_id})) as s:
            assert await s.as_(tls(a), server.node_id) == a.node_id
            assert await s.as_(tls(b), server.node_id) == grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(main())


def test_the_swarm_key_can_be_replaced_without_a_moment_of_strangers():
    async def main():
        server, client = NodeIdentity.generate(), NodeIdentity.generate()
        stages = [(KEY,), (KEY, OTHER), (OTHER, KEY), (OTHER,)]
        for i, at_server in enumerate(stages):
            async with Serving(tls(server, *at_server)) as s:
                for at_client in stages[max(0, i - 1) : i + 2]:  # members are at most one stage apart
                    assert await s.as_(tls(client, *at_client), server.node_id) == client.node_id
        async with Serving(tls(server, OTHER)) as s:
            assert await s.as_(tls(client, KEY), server.node_id) == REFUSED, "the old key is worth nothing any more"

    asyncio.run(main())


def test_pinning_where_nobody_answers_says_so():
    async def main():
        a = NodeIdentity.generate()
        with pytest.raises(PeerUnavailable, match="did not show its certificate"):
            await tls(a).pinned_root("127.0.0.1", 1, a.node_id, timeout_s=2)

    asyncio.run(main())


def test_a_context_without_a_certificate_proves_nothing():
    with pytest.raises(NotAuthorised):
        tls(NodeIdentity.generate()).peer_id({})
    with pytest.raises(NotAuthorised):
        tls(NodeIdentity.generate()).peer_id({"x509_pem_cert": [b"junk"]})
