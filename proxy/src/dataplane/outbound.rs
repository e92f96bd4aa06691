//! From a pod of this node: original destination, service or workload, endpoint, path.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use adit_common::HBONE_PORT;
use futures_util::FutureExt as _;
use http::StatusCode;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::places::Place;
use super::record::{Author, How, Party, Path, Peer, Phase, Reporter};
use super::standing::Standee;
use super::track::{Refusal, Track};
use super::worker::Worker;
use crate::hbone::{HboneError, PoolKey, Stream, Tunnel};
use crate::mesh::{Mesh, Protocol, SameNode, Workload};
use crate::node::{LocalPod, dial, dial_as};
use crate::policy::{self, Verdict};
use crate::relay::{AppStream, TunnelReader, TunnelWriter, relay};

/// How many endpoints of a service are tried for one connection.
const MAX_ENDPOINTS: usize = 3;

/// An endpoint to try, with its workload where that is known.
type Target = (Option<Arc<Workload>>, SocketAddr);

/// Where a connection goes on.
enum Next {
    Tunnel(Stream),
    Tcp(TcpStream),
    /// Nowhere: it tests whether it gets here.
    Test,
}

/// Carries one captured connection to its end. The application that dialled sees a reset where it is refused.
pub(super) async fn serve(worker: Rc<Worker>, pod: Arc<LocalPod>, tcp: TcpStream, client: SocketAddr) {
    let mut track = Track::new(&worker.plane, Reporter::Source, Path::Plain, Phase::Accept);
    let decided = worker.standing.moment();
    let place = Place::take(&worker.plane, &pod);
    let server_port = tcp.local_addr().map(|addr| addr.port());
    let app = AppStream::new(tcp);
    // In a box, so that what it needs is not kept while bytes flow.
    let established = Box::pin(establish(&worker, &pod, place, client, server_port, &mut track)).await;
    let (next, _place) = match established {
        Ok((Next::Test, _)) => {
            // Who tests sees an answer that is cut short.
            let _ = app.answer(pod.uid().as_bytes()).await;
            return track.forget();
        }
        Ok(next) => next,
        Err(refusal) => return track.end(refusal),
    };
    let connection = track.open();
    let (sent, received) = (&connection.sent, &connection.received);
    let outcome = match next {
        Next::Test => return,
        Next::Tunnel(stream) => {
            let standee = worker
                .standing
                .enter(&connection, stream.peer(), decided, &worker.plane.mesh);
            let (receiver, sender) = stream.split();
            relay(
                app.split(),
                (TunnelReader(receiver), TunnelWriter(sender)),
                sent,
                received,
                Some(standee.breaker()),
            )
            .await
        }
        Next::Tcp(tcp) => {
            let server = AppStream::new(tcp);
            let local = connection.path == Path::Local;
            let standee = local.then(|| worker.standing.enter(&connection, None, decided, &worker.plane.mesh));
            let breaker = standee.as_ref().map(Standee::breaker);
            let outcome = relay(app.split(), server.split(), sent, received, breaker).await;
            server.close_if(&outcome);
            outcome
        }
    };
    app.close_if(&outcome);
    track.end_of_relay(outcome);
}

async fn establish(
    worker: &Rc<Worker>,
    pod: &Arc<LocalPod>,
    place: Result<Place, Refusal>,
    client: SocketAddr,
    server_port: io::Result<u16>,
    track: &mut Track,
) -> Result<(Next, Option<Place>), Refusal> {
    let plane = &worker.plane;
    let ours = |how| (Party::Proxy, how);
    let mesh = plane.mesh.load();
    let source = mesh.workload_by_uid(pod.uid()).unwrap_or_else(|| pod.workload());
    if let Some(draft) = track.draft() {
        draft.source = Peer {
            addr: Some(client),
            workload: Some(Arc::clone(source)),
            identity: Some(pod.identity().clone()),
        };
    }
    // The client has reset the connection already.
    let server_port = server_port.map_err(|_| (Party::Source, How::Reset))?;
    let original = plane
        .flows
        .take(pod.netns().cookie(), client, server_port)
        .map_err(|error| ours(How::Error(error.to_string())))?
        .ok_or_else(|| {
            ours(How::Refused(
                "no connection was captured: the listener itself was dialled".to_owned(),
            ))
        })?;
    if plane.tests.is_test(&original) {
        return Ok((Next::Test, None));
    }
    if let Some(draft) = track.draft() {
        draft.destination.addr = Some(original.addr);
        draft.author = Some(Author {
            pid: original.pid,
            command: original.command,
            cgroup: original.cgroup,
        });
    }

    let place = place?;
    track.phase(Phase::Decide);
    let mut failure = ours(How::Refused("no endpoint".to_owned()));
    let targets = destinations(worker, &mesh, source, original.addr, track)?;
    for (workload, addr) in chosen_first(targets, original.endpoint).into_iter().take(MAX_ENDPOINTS) {
        let attempt = attempt(worker, pod, &mesh, client, workload.as_ref(), addr, track).await;
        match attempt {
            Ok(next) => return Ok((next, Some(place))),
            // A policy's answer, or our own missing certificate, holds for every endpoint; an application that has reset
            // the connection has had it.
            Err(refusal @ ((_, How::Policy(_) | How::Reset) | (Party::Proxy, How::Identity(_)))) => {
                return Err(refusal);
            }
            Err(refusal) => failure = refusal,
        }
    }
    Err(failure)
}

/// The endpoints to try in turn.
fn destinations(
    worker: &Worker,
    mesh: &Mesh,
    source: &Workload,
    dialled: SocketAddr,
    track: &mut Track,
) -> Result<Vec<Target>, Refusal> {
    if let Some(service) = mesh.service_by_addr(dialled.ip()) {
        if let Some(draft) = track.draft() {
            draft.service = Some(Arc::clone(service));
        }
        let endpoints = mesh
            .endpoints(service, dialled, source, &mut worker.rng.borrow_mut())
            .map_err(|error| (Party::Proxy, How::Refused(error.to_string())))?;
        return Ok(endpoints);
    }
    Ok(vec![(mesh.workload_by_addr(dialled.ip()).cloned(), dialled)])
}

/// Puts the endpoint that the kernel has chosen before the others. One that is not to be used any more is passed over.
fn chosen_first(mut targets: Vec<Target>, chosen: Option<SocketAddr>) -> Vec<Target> {
    if let Some(at) = targets.iter().position(|(_, addr)| Some(*addr) == chosen) {
        targets[..=at].rotate_right(1);
    }
    targets
}

/// Tries one endpoint.
async fn attempt(
    worker: &Rc<Worker>,
    pod: &Arc<LocalPod>,
    mesh: &Mesh,
    client: SocketAddr,
    workload: Option<&Arc<Workload>>,
    addr: SocketAddr,
    track: &mut Track,
) -> Result<Next, Refusal> {
    // What it excludes is outside the mesh, whoever dials it.
    let in_mesh =
        workload.filter(|workload| workload.protocol == Protocol::Hbone && !workload.excludes_inbound(addr.port()));
    let encrypted = |workload: &Workload| workload.same_node == SameNode::Encrypted;
    let source = mesh.workload_by_uid(pod.uid()).unwrap_or_else(|| pod.workload());
    let local = match in_mesh.filter(|workload| !encrypted(workload) && !encrypted(source)) {
        Some(workload) => local_pod(worker, pod, workload).await,
        None => None,
    };
    if let Some(draft) = track.draft() {
        draft.destination.addr = Some(addr);
        draft.destination.workload = workload.cloned();
        draft.destination.identity = in_mesh.map(|workload| workload.identity.clone());
        draft.path = match (&in_mesh, &local) {
            (None, _) => Path::Plain,
            (Some(_), None) => Path::Hbone,
            (Some(_), Some(_)) => Path::Local,
        };
    }
    // A pod that may configure its namespace can take any address for its source. In the mesh the address would be
    // shown to the application and to policies as this pod's, which it is not.
    if in_mesh.is_some() && !pod.workload().addresses.contains(&client.ip()) {
        let how = How::Refused(format!("the source {} is not an address of this pod", client.ip()));
        return Err((Party::Proxy, how));
    }
    match (in_mesh, local) {
        // To a peer outside the mesh.
        (None, _) => connected(worker, addr, dial(pod.netns(), bound_to(pod, client), addr), track)
            .await
            .map(Next::Tcp),
        (Some(workload), None) => tunnel(worker, pod, client, workload, addr, track)
            .await
            .map(Next::Tunnel),
        (Some(workload), Some(destination)) => {
            same_node(worker, pod, &destination, mesh, client, workload, addr, track)
                .await
                .map(Next::Tcp)
        }
    }
}

/// The destination, where it is enrolled on this node. While pods are taken over from another process, one of them may be
/// dialled whose turn is yet to come.
async fn local_pod(worker: &Worker, source: &LocalPod, destination: &Workload) -> Option<Arc<LocalPod>> {
    let plane = &worker.plane;
    let found = plane.pods.get(&destination.uid);
    if found.is_some() || destination.node != source.workload().node {
        return found;
    }
    let mut enrolling = plane.enrolling.clone();
    // Whoever does not come in time, or never, is dialled as one of another node.
    let _ = timeout(
        plane.settings.connect_timeout,
        enrolling.wait_for(|enrolling| !enrolling),
    )
    .await;
    plane.pods.get(&destination.uid)
}

/// The address to dial from: the client's, where the kernel could choose another.
fn bound_to(pod: &LocalPod, client: SocketAddr) -> Option<IpAddr> {
    let alike = pod
        .workload()
        .addresses
        .iter()
        .filter(|ip| ip.is_ipv4() == client.is_ipv4())
        .count();
    (alike > 1).then(|| client.ip())
}

/// To a pod of this node: the destination's policy, with the source's identity, decides here; nothing leaves the node.
#[expect(clippy::too_many_arguments, reason = "all that a decision rests on")]
async fn same_node(
    worker: &Worker,
    pod: &LocalPod,
    destination: &LocalPod,
    mesh: &Mesh,
    client: SocketAddr,
    workload: &Workload,
    addr: SocketAddr,
    track: &mut Track,
) -> Result<TcpStream, Refusal> {
    let request = policy::Request {
        source: Some(pod.identity()),
        source_ip: client.ip(),
        destination_ip: addr.ip(),
        destination_port: addr.port(),
    };
    permit(mesh, workload, &request, track)?;
    connect_app(worker, destination, client, addr, track).await
}

/// Connects to the application of a pod on behalf of `client`.
pub(super) async fn connect_app(
    worker: &Worker,
    pod: &LocalPod,
    client: SocketAddr,
    to: SocketAddr,
    track: &mut Track,
) -> Result<TcpStream, Refusal> {
    let dialled = dial_as(pod.netns(), &worker.plane.clients, pod.local_ports(), client, to);
    connected(worker, to, dialled, track).await
}

async fn connected(
    worker: &Worker,
    to: SocketAddr,
    dialled: impl Future<Output = io::Result<TcpStream>>,
    track: &mut Track,
) -> Result<TcpStream, Refusal> {
    track.phase(Phase::Connect);
    match timeout(worker.plane.settings.connect_timeout, dialled).await {
        Ok(Ok(tcp)) => Ok(tcp),
        // Accepted, and reset at once.
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => Err((Party::Destination, How::Reset)),
        Ok(Err(error)) => Err((Party::Destination, How::Refused(format!("connecting to {to}: {error}")))),
        Err(_) => Err((Party::Destination, How::Timeout)),
    }
}

/// Asks the policies that apply to `workload`; none do at a port that it excludes.
pub(super) fn permit(
    mesh: &Mesh,
    workload: &Workload,
    request: &policy::Request<'_>,
    track: &Track,
) -> Result<(), Refusal> {
    if workload.excludes_inbound(request.destination_port) {
        return Ok(());
    }
    let decision = policy::evaluate(mesh.policies(), workload, request);
    for rule in &decision.dry_run_denials {
        track.would_deny(&rule.to_string());
    }
    match decision.verdict {
        Verdict::Allow { .. } => Ok(()),
        Verdict::Deny { rule } => Err((Party::Proxy, How::Policy(rule.to_string()))),
    }
}

/// To a pod of another node, through a tunnel to its proxy.
async fn tunnel(
    worker: &Rc<Worker>,
    pod: &Arc<LocalPod>,
    client: SocketAddr,
    workload: &Arc<Workload>,
    addr: SocketAddr,
    track: &mut Track,
) -> Result<Stream, Refusal> {
    let plane = &worker.plane;
    let peer = SocketAddr::new(addr.ip(), HBONE_PORT.0);
    let key = PoolKey {
        source: pod.identity().clone(),
        source_uid: Arc::clone(pod.uid()),
        source_ip: client.ip(),
        destination: workload.identity.clone(),
        destination_uid: Arc::clone(&workload.uid),
        addr: peer,
    };
    if let Some(draft) = track.draft() {
        draft.tunnel = Some(peer);
    }
    track.phase(Phase::Identity);
    let certificate = match plane.certs.try_get(pod.identity()) {
        Some(certificate) => certificate,
        None => plane
            .certs
            .get(pod.identity())
            .await
            .map_err(|error| (Party::Proxy, How::Identity(error.to_string())))?,
    };
    track.phase(Phase::Request);
    let establish = || {
        let (worker, pod, destination) = (Rc::clone(worker), Arc::clone(pod), workload.identity.clone());
        let certificate = Arc::clone(&certificate);
        async move {
            let plane = &worker.plane;
            let tcp = timeout(
                plane.settings.connect_timeout,
                dial(pod.netns(), bound_to(&pod, client), peer),
            )
            .await
            .map_err(|_| HboneError::ConnectTimeout)?
            .map_err(|error| HboneError::Connect(error.to_string()))?;
            let start = Instant::now();
            let tunnel = Tunnel::establish(tcp, &certificate, &destination, Rc::clone(&worker.hbone)).await?;
            plane.observer.handshake(Reporter::Source, start.elapsed());
            Ok(tunnel)
        }
        .boxed_local()
    };
    let stream = worker.pool.open(&key, addr, client, establish).await.map_err(|error| {
        track.phase(phase_of(&error));
        refusal_of(&error, peer)
    })?;
    if let Some(draft) = track.draft() {
        draft.certificate_serial = stream.certificate().cloned();
    }
    Ok(stream)
}

fn phase_of(error: &HboneError) -> Phase {
    match error {
        HboneError::Connect(_) | HboneError::ConnectTimeout => Phase::Connect,
        HboneError::Tls(_) | HboneError::HandshakeTimeout => Phase::Handshake,
        HboneError::Http2(_) | HboneError::Status(_) | HboneError::Reset | HboneError::RequestTimeout => Phase::Request,
    }
}

fn refusal_of(error: &HboneError, peer: SocketAddr) -> Refusal {
    let text = || format!("tunnel to {peer}: {error}");
    let how = match error {
        HboneError::ConnectTimeout | HboneError::HandshakeTimeout | HboneError::RequestTimeout => How::Timeout,
        HboneError::Reset => How::Reset,
        HboneError::Tls(_) => How::Identity(text()),
        HboneError::Status(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
            How::Policy(format!("the destination's proxy refuses: {error}"))
        }
        HboneError::Connect(_) | HboneError::Status(_) => How::Refused(text()),
        HboneError::Http2(_) => How::Error(text()),
    };
    (Party::Destination, how)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_endpoint_that_was_chosen_is_tried_first_and_the_others_follow_in_their_order() {
        let addr = |n: u8| SocketAddr::from(([10, 0, 0, n], 80));
        for (chosen, order) in [
            (Some(addr(1)), [1, 2, 3]),
            (Some(addr(3)), [3, 1, 2]),
            (Some(addr(9)), [1, 2, 3]),
            (None, [1, 2, 3]),
        ] {
            let targets = [1, 2, 3].map(|n| (None, addr(n))).to_vec();
            let tried: Vec<SocketAddr> = chosen_first(targets, chosen)
                .into_iter()
                .map(|(_, addr)| addr)
                .collect();
            assert_eq!(tried, order.map(addr), "{chosen:?}");
        }
    }

    #[test]
    fn a_tunnels_failure_is_told_by_phase_and_kind() {
        let peer = "10.0.0.1:15008".parse().unwrap();
        for (error, phase, kind) in [
            (HboneError::Connect("refused".to_owned()), Phase::Connect, "refused"),
            (HboneError::ConnectTimeout, Phase::Connect, "timeout"),
            (
                HboneError::Tls("bad certificate".to_owned()),
                Phase::Handshake,
                "identity",
            ),
            (HboneError::HandshakeTimeout, Phase::Handshake, "timeout"),
            (HboneError::Http2("broken".to_owned()), Phase::Request, "error"),
            (HboneError::Status(StatusCode::UNAUTHORIZED), Phase::Request, "policy"),
            (
                HboneError::Status(StatusCode::SERVICE_UNAVAILABLE),
                Phase::Request,
                "refused",
            ),
            (HboneError::Reset, Phase::Request, "reset"),
            (HboneError::RequestTimeout, Phase::Request, "timeout"),
        ] {
            assert_eq!(
                (phase_of(&error), refusal_of(&error, peer).1.as_str()),
                (phase, kind),
                "{error}"
            );
        }
    }
}
