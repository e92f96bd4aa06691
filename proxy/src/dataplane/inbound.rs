//! To a pod of this node: tunnels from other nodes, and plaintext from outside the mesh.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use http::StatusCode;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::accept::Drain;
use super::outbound::{connect_app, permit};
use super::places::Place;
use super::record::{How, Party, Path, Peer, Phase, Reporter};
use super::track::{Refusal, Track};
use super::worker::Worker;
use crate::hbone::{self, Incoming, ServerConnection, Stream};
use crate::identity::{Certificate, PeerChain, SpiffeId};
use crate::mesh::{Mesh, Workload};
use crate::node::LocalPod;
use crate::policy;
use crate::relay::{AppStream, TunnelReader, TunnelWriter, relay};

/// A listener is bound to a loopback address, at which nothing is ever steered to it.
const LISTENER_DIALLED: &str = "the listener itself was dialled";

/// Serves one tunnel to its end.
pub(super) async fn serve_tunnel(
    worker: Rc<Worker>,
    pod: Arc<LocalPod>,
    tcp: TcpStream,
    from: SocketAddr,
    mut drain: Drain,
) {
    if tcp.local_addr().is_ok_and(|to| to.ip().to_canonical().is_loopback()) {
        let _reset = AppStream::new(tcp);
        let mut track = Track::new(&worker.plane, Reporter::Destination, Path::Hbone, Phase::Accept);
        return track.end((Party::Proxy, How::Refused(LISTENER_DIALLED.to_owned())));
    }
    let _place = match Place::take(&worker.plane, &pod) {
        Ok(place) => place,
        Err(refusal) => {
            let _reset = AppStream::new(tcp);
            return Track::new(&worker.plane, Reporter::Destination, Path::Hbone, Phase::Accept).end(refusal);
        }
    };
    let (tunnel, certificate) = match Box::pin(accept_tunnel(&worker, &pod, tcp, from)).await {
        Ok(accepted) => accepted,
        Err((mut track, refusal)) => return track.end(refusal),
    };
    let peer = Arc::clone(tunnel.chain());
    let closed = Cell::new(false);
    let streams = RefCell::new(JoinSet::new());
    let mut served = pin!(tunnel.serve(&worker.hbone, drain.begun(), |incoming| {
        // A peer may reset streams, and so get places for more, faster than what was begun for them ends.
        if streams.borrow().len() >= 2 * worker.hbone.max_streams as usize {
            incoming.refuse(StatusCode::SERVICE_UNAVAILABLE);
            return;
        }
        if closed.get() {
            incoming.refuse(StatusCode::UNAUTHORIZED);
            return;
        }
        let (worker, pod, peer) = (Rc::clone(&worker), Arc::clone(&pod), Arc::clone(&peer));
        let serial = Arc::clone(certificate.serial());
        streams
            .borrow_mut()
            .spawn_local(serve_stream(worker, pod, incoming, from, peer, serial));
    }));
    let serve = poll_fn(|cx| {
        while let Poll::Ready(Some(_)) = streams.borrow_mut().poll_join_next(cx) {}
        served.as_mut().poll(cx)
    });
    // Its streams are cut by the worker, each with the reason in its record; the tunnel goes when they have.
    let end = hbone::given_up(&peer, &closed, || streams.borrow().is_empty());
    let cut = tokio::select! {
        served = serve => {
            if let Err(error) = served {
                tracing::debug!("tunnel from {from} ({}): {error}", peer.id());
            }
            false
        }
        reason = end => {
            tracing::info!("tunnel from {from}: closing: {reason}");
            true
        }
    };
    let mut streams = streams.take();
    if cut {
        // Nothing moves their bytes any more.
        streams.abort_all();
    }
    while streams.join_next().await.is_some() {}
}

async fn accept_tunnel(
    worker: &Rc<Worker>,
    pod: &Arc<LocalPod>,
    tcp: TcpStream,
    from: SocketAddr,
) -> Result<(ServerConnection, Arc<Certificate>), (Track, Refusal)> {
    let plane = &worker.plane;
    let mut track = Track::new(plane, Reporter::Destination, Path::Hbone, Phase::Identity);
    if let Some(draft) = track.draft() {
        draft.source.addr = Some(from);
        draft.destination.workload = Some(Arc::clone(pod.workload()));
    }
    let certificate = match plane.certs.try_get(pod.identity()) {
        Some(certificate) => certificate,
        None => match plane.certs.get(pod.identity()).await {
            Ok(certificate) => certificate,
            Err(error) => return Err((track, (Party::Proxy, How::Identity(error.to_string())))),
        },
    };
    track.phase(Phase::Handshake);
    let start = Instant::now();
    match hbone::accept(tcp, &certificate, &worker.hbone).await {
        Ok(tunnel) => {
            plane.observer.handshake(Reporter::Destination, start.elapsed());
            track.forget();
            Ok((tunnel, certificate))
        }
        Err(error) => {
            let how = match error {
                hbone::HboneError::HandshakeTimeout => How::Timeout,
                _ => How::Identity(error.to_string()),
            };
            Err((track, (Party::Source, how)))
        }
    }
}

async fn serve_stream(
    worker: Rc<Worker>,
    pod: Arc<LocalPod>,
    incoming: Incoming,
    from: SocketAddr,
    peer: Arc<PeerChain>,
    serial: Arc<str>,
) {
    let mut track = Track::new(&worker.plane, Reporter::Destination, Path::Hbone, Phase::Request);
    let decided = worker.standing.moment();
    if let Some(draft) = track.draft() {
        draft.certificate_serial = Some(serial);
        draft.source.identity = Some(peer.id().clone());
    }
    let (stream, app, _place) =
        match Box::pin(connect_stream(&worker, &pod, incoming, from, peer.id(), &mut track)).await {
            Ok(connected) => connected,
            Err(refusal) => return track.end(refusal),
        };
    let connection = track.open();
    let (receiver, sender) = stream.split();
    let client = (TunnelReader(receiver), TunnelWriter(sender));
    let standee = worker
        .standing
        .enter(&connection, Some(&peer), decided, &worker.plane.mesh);
    let (sent, received, breaker) = (&connection.sent, &connection.received, Some(standee.breaker()));
    let outcome = relay(client, app.split(), sent, received, breaker).await;
    app.close_if(&outcome);
    track.end_of_relay(outcome);
}

/// Decides on a request, connects to the application, and only then grants the stream.
async fn connect_stream(
    worker: &Rc<Worker>,
    pod: &Arc<LocalPod>,
    incoming: Incoming,
    from: SocketAddr,
    peer: &SpiffeId,
    track: &mut Track,
) -> Result<(Stream, AppStream, Place), Refusal> {
    let refuse = |incoming: Incoming, status, how| {
        incoming.refuse(status);
        Err((Party::Proxy, how))
    };
    let mesh = worker.plane.mesh.load();
    let workload = Arc::clone(mesh.workload_by_uid(pod.uid()).unwrap_or_else(|| pod.workload()));
    let request = match &incoming.request {
        Ok(request) if incoming.is_connect() => *request,
        Ok(_) => {
            return refuse(
                incoming,
                StatusCode::BAD_REQUEST,
                How::Refused("not a CONNECT request".to_owned()),
            );
        }
        Err(error) => {
            let how = How::Refused(error.to_string());
            return refuse(incoming, StatusCode::BAD_REQUEST, how);
        }
    };
    let to = request.authority.addr();
    // The peer is believed on the port, not on the address: that one the network shows.
    let client = request
        .forwarded
        .filter(|forwarded| forwarded.ip() == from.ip())
        .unwrap_or(from);
    describe(track, &mesh, pod, &workload, client, to);
    if !workload.addresses.contains(&to.ip()) {
        let how = How::Refused(format!("{to} is not an address of this pod"));
        return refuse(incoming, StatusCode::BAD_REQUEST, how);
    }
    track.phase(Phase::Decide);
    let asked = policy::Request {
        source: Some(peer),
        source_ip: from.ip(),
        destination_ip: to.ip(),
        destination_port: to.port(),
    };
    if let Err((_, how)) = permit(&mesh, &workload, &asked, track) {
        return refuse(incoming, StatusCode::UNAUTHORIZED, how);
    }
    let place = match Place::take(&worker.plane, pod) {
        Ok(place) => place,
        Err((_, how)) => return refuse(incoming, StatusCode::SERVICE_UNAVAILABLE, how),
    };
    match connect_app(worker, pod, client, to, track).await {
        Ok(app) => {
            let app = AppStream::new(app);
            let stream = incoming.grant().map_err(|_| (Party::Source, How::Reset))?;
            Ok((stream, app, place))
        }
        Err(refusal @ (_, How::Reset)) => {
            incoming.reset();
            Err(refusal)
        }
        Err(refusal) => {
            incoming.refuse(StatusCode::SERVICE_UNAVAILABLE);
            Err(refusal)
        }
    }
}

/// Carries one plaintext connection to its end.
pub(super) async fn serve_plaintext(worker: Rc<Worker>, pod: Arc<LocalPod>, tcp: TcpStream, from: SocketAddr) {
    let mut track = Track::new(&worker.plane, Reporter::Destination, Path::Plain, Phase::Accept);
    let decided = worker.standing.moment();
    let to = tcp
        .local_addr()
        .map(|to| SocketAddr::new(to.ip().to_canonical(), to.port()));
    let client = AppStream::new(tcp);
    // The client has reset the connection already.
    let to = match to {
        Ok(to) if to.ip().is_loopback() => return track.end((Party::Proxy, How::Refused(LISTENER_DIALLED.to_owned()))),
        Ok(to) => to,
        // The client has reset the connection already.
        Err(_) => return track.end((Party::Source, How::Reset)),
    };
    let (app, _place) = match Box::pin(connect_plaintext(&worker, &pod, from, to, &mut track)).await {
        Ok((app, place)) => (AppStream::new(app), place),
        Err(refusal) => return track.end(refusal),
    };
    let connection = track.open();
    let standee = worker.standing.enter(&connection, None, decided, &worker.plane.mesh);
    let (sent, received, breaker) = (&connection.sent, &connection.received, Some(standee.breaker()));
    let outcome = relay(client.split(), app.split(), sent, received, breaker).await;
    client.close_if(&outcome);
    app.close_if(&outcome);
    track.end_of_relay(outcome);
}

async fn connect_plaintext(
    worker: &Worker,
    pod: &Arc<LocalPod>,
    from: SocketAddr,
    to: SocketAddr,
    track: &mut Track,
) -> Result<(TcpStream, Place), Refusal> {
    let mesh = worker.plane.mesh.load();
    let workload = Arc::clone(mesh.workload_by_uid(pod.uid()).unwrap_or_else(|| pod.workload()));
    describe(track, &mesh, pod, &workload, from, to);
    track.phase(Phase::Decide);
    let asked = policy::Request {
        source: None,
        source_ip: from.ip(),
        destination_ip: to.ip(),
        destination_port: to.port(),
    };
    permit(&mesh, &workload, &asked, track)?;
    let place = Place::take(&worker.plane, pod)?;
    let app = connect_app(worker, pod, from, to, track).await?;
    Ok((app, place))
}

fn describe(
    track: &mut Track,
    mesh: &Mesh,
    pod: &LocalPod,
    workload: &Arc<Workload>,
    client: SocketAddr,
    to: SocketAddr,
) {
    if let Some(draft) = track.draft() {
        // A proven identity and an address that is another's: the address is not what was proven.
        let source = mesh.workload_by_addr(client.ip()).filter(|source| {
            draft
                .source
                .identity
                .as_ref()
                .is_none_or(|proven| *proven == source.identity)
        });
        draft.source.workload = source.cloned();
        draft.source.addr = Some(client);
        draft.destination = Peer {
            addr: Some(to),
            workload: Some(Arc::clone(workload)),
            identity: Some(pod.identity().clone()),
        };
    }
}
