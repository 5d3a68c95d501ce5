"""Every message that crosses a ZeroMQ socket, and the codecs for them.

Each frame is one msgpack array of messages: whoever wakes up sends each peer everything that is due to it
at once. A message is a tagged array, ``[tag, field, ...]``; unknown tags and wrong types are refused by the
decoder. A connection is DEALER to ROUTER, its identity a fresh random id per process (:func:`new_peer`),
and its first message names the protocol version.

    guardian  -> broker   Hello Beat Died Left Bye
    engine    -> broker   Ready Emit Finish Failed Checkpoint Took Release Resync Beat Bye
    client    -> broker   Connect Beat Submit Attach Taken Abort Forget Release Resync Inspect Letters
                          Unplaced Bye
    broker    -> guardian Welcome Reject Who Beat Kill Drain Hosts Unlink Sweep
    broker    -> engine   Welcome Reject Who Seen Assign Input Grant Cancel Drain Free Hosts
    broker    -> client   Connected Reject Who Beat Busy Accepted Attached Refused Output Ended Report Free
                          Hosts

A task is named (request, stage, attempt) everywhere: ``request`` is the broker's own number, ``stage`` the
position in ``Pipeline.order()``, ``attempt`` counts from 1.

**When the broker dies** and comes back, it knows from its journal all that it had read; what was under way
in either direction is lost. It sends Who with its new ``boot`` to every engine and client that it remembers.
These introduce themselves once per boot:

* an engine: Ready with the leases it holds; then again, in order, every Emit, Finish, Failed and Checkpoint
  that no Seen has covered; then Resync. The broker takes each chunk number of a task once, so what it had
  read already has no effect; it sends what a lease lacks (Input), and Cancel for a lease it does not want.
* a client: Connect; then again the Submit (or the Attach) of every request it has open, with ``received``;
  then Resync. A Submit whose ``name`` the broker knows continues that request, else it is a new one.

**Flow control.** A task may be ahead of the slowest consumer of its streaming edges and of its caller by
``limits.ahead_chunks`` chunks and ``limits.ahead_mb`` MiB; the first chunk beyond that waits in its worker
until a Grant. Consumers say what they have taken (Took, Taken) each time a quarter of that has gathered, so
short streams cost no message.
"""

from __future__ import annotations

import msgspec

from broker.protocol.clients import (
    Abort,
    Accepted,
    Attach,
    Attached,
    Busy,
    Connect,
    Connected,
    Ended,
    Forget,
    Inspect,
    Letters,
    Output,
    Refused,
    Report,
    Submit,
    Taken,
    Unplaced,
)
from broker.protocol.shared import (
    NAME,
    VERSION,
    Beat,
    Bye,
    Error,
    Free,
    Hosts,
    Message,
    Peer,
    Reject,
    Release,
    Resync,
    Timing,
    Who,
    new_peer,
)
from broker.protocol.workers import (
    Assign,
    Cancel,
    Checkpoint,
    Died,
    Drain,
    EdgeInput,
    Emit,
    Failed,
    Finish,
    Grant,
    Hello,
    Input,
    Kill,
    Lease,
    Left,
    Ready,
    Resume,
    Seen,
    Sweep,
    Took,
    Unlink,
    Welcome,
)

__all__ = [
    "NAME",
    "VERSION",
    "Abort",
    "Accepted",
    "Assign",
    "Attach",
    "Attached",
    "Beat",
    "Busy",
    "Bye",
    "Cancel",
    "Checkpoint",
    "Connect",
    "Connected",
    "Died",
    "Drain",
    "EdgeInput",
    "Emit",
    "Ended",
    "Error",
    "Failed",
    "Finish",
    "Forget",
    "Free",
    "FromClient",
    "FromWorker",
    "Grant",
    "Hello",
    "Hosts",
    "Input",
    "Inspect",
    "Kill",
    "Lease",
    "Left",
    "Letters",
    "Message",
    "Output",
    "Peer",
    "Ready",
    "Refused",
    "Reject",
    "Release",
    "Report",
    "Resume",
    "Resync",
    "Seen",
    "Submit",
    "Sweep",
    "Taken",
    "Timing",
    "ToClient",
    "ToWorker",
    "Took",
    "Unlink",
    "Unplaced",
    "Welcome",
    "Who",
    "decode_from_client",
    "decode_from_worker",
    "decode_to_client",
    "decode_to_worker",
    "encode",
    "new_peer",
]

FromGuardian = Hello | Beat | Died | Left | Bye
FromWorker = FromGuardian | Ready | Emit | Finish | Failed | Checkpoint | Took | Release | Resync
ToGuardian = Welcome | Reject | Who | Beat | Kill | Drain | Hosts | Unlink | Sweep
ToWorker = ToGuardian | Seen | Assign | Input | Grant | Cancel | Free
FromClient = (
    Connect
    | Beat
    | Submit
    | Attach
    | Taken
    | Abort
    | Forget
    | Release
    | Resync
    | Inspect
    | Letters
    | Unplaced
    | Bye
)
ToClient = (
    Connected
    | Reject
    | Who
    | Beat
    | Busy
    | Accepted
    | Attached
    | Refused
    | Output
    | Ended
    | Report
    | Free
    | Hosts
)

encode = msgspec.msgpack.Encoder().encode
decode_from_worker = msgspec.msgpack.Decoder(list[FromWorker]).decode
decode_to_worker = msgspec.msgpack.Decoder(list[ToWorker]).decode
decode_from_client = msgspec.msgpack.Decoder(list[FromClient]).decode
decode_to_client = msgspec.msgpack.Decoder(list[ToClient]).decode
