//! Direct connections: no byte of them passes this process, but they are logged, counted and ended like the others.

mod ending;
mod missed;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use adit_common::{Addr, Direct, DirectEnd, DirectKind, HostPort};

use super::Dataplane;
use super::record::{Author, Connection, End, How, Measured, Party, Path, Peer, Phase, Reporter};
use super::standing::forbidding_rule;
use crate::identity::SpiffeId;
use crate::mesh::{Mesh, Place, Workload};
use crate::node::LocalPod;
use crate::steer::{OpenDirect, OpenSocket, SockDiag, SteerError, command, monotonic_ns};
use ending::{bytes, outcome, state};
use missed::Missed;

/// How many pods that have left are remembered, for the ends of their connections.
const REMEMBERED_PODS: usize = 4096;

/// The direct connections of this node's pods.
pub struct DirectConnections {
    plane: Arc<Dataplane>,
    open: OpenDirect,
    state: Mutex<State>,
    /// How many ended without a word of the kernel's.
    lost: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Those that the observer has been told of, by their sockets' cookies.
    announced: HashMap<u64, Arc<Connection>>,
    /// Those that were ended, and the rule that forbids them.
    forbidden: HashMap<u64, String>,
    /// Whose network namespace a cookie is, of pods that have left too.
    pods: HashMap<u64, (Arc<Workload>, SpiffeId)>,
    missed: Missed,
}

impl DirectConnections {
    /// Those that the kernel keeps in `open`.
    pub fn new(plane: Arc<Dataplane>, open: OpenDirect) -> Self {
        Self {
            plane,
            open,
            state: Mutex::default(),
            lost: AtomicU64::new(0),
        }
    }

    /// Tells the observer of those that have been opened and are not told of yet.
    pub fn announce(&self) -> Result<(), SteerError> {
        let mesh = self.plane.mesh.load();
        let mut state = self.state();
        self.learn_pods(&mut state);
        for (cookie, direct) in self.open_now(&state)? {
            if !state.announced.contains_key(&cookie)
                && let Some(connection) = self.connection(&state, &mesh, &direct)
            {
                let connection = Arc::new(connection);
                self.plane.observer.opened(&connection);
                state.announced.insert(cookie, connection);
            }
        }
        Ok(())
    }

    /// One has ended, or was refused.
    pub fn ended(&self, end: &DirectEnd) {
        let mesh = self.plane.mesh.load();
        let mut state = self.state();
        if !state.pods.contains_key(&end.direct.netns) {
            self.learn_pods(&mut state);
        }
        let announced = state.announced.remove(&end.cookie);
        let was_announced = announced.is_some();
        let forbidden = state.forbidden.remove(&end.cookie);
        let connection = announced.or_else(|| self.connection(&state, &mesh, &end.direct).map(Arc::new));
        drop(state);
        // A pod that nobody has told of, and that is gone: its connection had no name ever.
        let Some(connection) = connection else { return };
        let (by, phase, how) = match (forbidden, end.direct.state) {
            (Some(rule), _) => (Party::Proxy, Phase::Relay, How::Policy(rule)),
            (None, state::REFUSED) if end.direct.server.is_none() => (
                Party::Proxy,
                Phase::Decide,
                How::Refused(why_nowhere(&mesh, &connection)),
            ),
            (None, state::REFUSED) => {
                let rule = own_rule_against(&mesh, &connection);
                let rule = rule.unwrap_or_else(|| "by a policy that has changed since".to_owned());
                (Party::Proxy, Phase::Decide, How::Policy(rule))
            }
            (None, _) => outcome(end.direct.state, connection.reporter, connection.destination.addr),
        };
        let (sent, received) = bytes(end);
        connection.sent.store(sent, Ordering::Relaxed);
        connection.received.store(received, Ordering::Relaxed);
        let end = End {
            by,
            phase,
            how,
            duration: Duration::from_nanos(end.direct.closed.saturating_sub(end.direct.opened)),
            measured: (phase == Phase::Relay).then(|| Measured {
                round_trip: Duration::from_micros(u64::from(end.direct.srtt >> 3)),
                retransmits: end.direct.retransmits,
            }),
        };
        let observer = &self.plane.observer;
        if phase == Phase::Relay && !was_announced {
            observer.opened(&connection);
        }
        observer.closed(&connection, &end);
    }

    /// Ends the open ones that the mesh's policies forbid by now. To be called once the kernel lets no new ones through.
    /// Gives how many there were.
    pub fn enforce(&self) -> Result<usize, SteerError> {
        let mesh = self.plane.mesh.load();
        let pods = self.plane.pods.all();
        let by_netns: HashMap<u64, &Arc<LocalPod>> = pods.values().map(|pod| (pod.netns().cookie(), pod)).collect();
        let mut state = self.state();
        self.learn_pods(&mut state);
        let mut doomed: HashMap<u64, Vec<OpenSocket>> = HashMap::new();
        let mut count = 0;
        // The kubelet's probes are let through whatever policies say.
        let under_policy = self
            .open_now(&state)?
            .into_iter()
            .filter(|(_, direct)| direct.kind != DirectKind::Probe as u16);
        for (cookie, direct) in under_policy {
            let connection = match state.announced.get(&cookie) {
                Some(connection) => Arc::clone(connection),
                None => match self.connection(&state, &mesh, &direct) {
                    Some(connection) => Arc::new(connection),
                    None => continue,
                },
            };
            let Some(rule) = own_rule_against(&mesh, &connection) else {
                continue;
            };
            let (client, server) = ends(&direct);
            let (local, remote) = match connection.reporter {
                Reporter::Source => (client, server),
                Reporter::Destination => (server, client),
            };
            doomed
                .entry(direct.netns)
                .or_default()
                .push(OpenSocket { local, remote, cookie });
            if state.announced.insert(cookie, Arc::clone(&connection)).is_none() {
                self.plane.observer.opened(&connection);
            }
            state.forbidden.insert(cookie, rule);
            count += 1;
        }
        drop(state);
        for (netns, sockets) in doomed {
            let Some(pod) = by_netns.get(&netns) else { continue };
            let destroyed = pod
                .netns()
                .run(SockDiag::open)
                .map_err(std::io::Error::other)
                .flatten()
                .and_then(|diag| diag.destroy(&sockets));
            if let Err(error) = destroyed {
                tracing::error!(
                    "ending {} connections of pod {}/{} that policies forbid by now: {error}; they go on",
                    sockets.len(),
                    pod.workload().namespace,
                    pod.workload().name
                );
            }
        }
        Ok(count)
    }

    /// Those that are open. With the state held: the end of one that is among them is told only after that, and finds it
    /// announced.
    fn open_now(&self, _: &MutexGuard<'_, State>) -> Result<HashMap<u64, Direct>, SteerError> {
        self.open.all()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere does not make the state wrong.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn learn_pods(&self, state: &mut State) {
        let pods = self.plane.pods.all();
        if state.pods.len() + pods.len() > REMEMBERED_PODS {
            state.pods.clear();
        }
        let named = |pod: &LocalPod| (Arc::clone(pod.workload()), pod.identity().clone());
        state
            .pods
            .extend(pods.values().map(|pod| (pod.netns().cookie(), named(pod))));
    }

    /// What is known of one. None where its pod is not known.
    fn connection(&self, state: &State, mesh: &Mesh, direct: &Direct) -> Option<Connection> {
        let (workload, identity) = state.pods.get(&direct.netns)?;
        let dialled = socket(direct.dialled, direct.dialled_port);
        let (client, server) = ends(direct);
        let server = if direct.server.is_none() { dialled } else { server };
        let client = (client.port() != 0).then_some(client);
        let own = |addr| Peer {
            addr,
            workload: Some(Arc::clone(workload)),
            identity: Some(identity.clone()),
        };
        let outbound = direct.kind == DirectKind::Outbound as u16;
        let other = if outbound { Some(server) } else { client };
        let other_workload = other.and_then(|addr| mesh.workload_by_addr(addr.ip())).cloned();
        // Proven for a pod of this node alone, by the namespace that the kernel has connected to.
        let other_identity = other_workload
            .as_ref()
            .filter(|other| outbound && self.plane.pods.get(&other.uid).is_some());
        let other = Peer {
            addr: other,
            identity: other_identity.map(|other| other.identity.clone()),
            workload: other_workload,
        };
        let age = Duration::from_nanos(monotonic_ns().saturating_sub(direct.opened));
        Some(Connection {
            id: self.plane.next_id(),
            opened: SystemTime::now() - age,
            reporter: if outbound {
                Reporter::Source
            } else {
                Reporter::Destination
            },
            path: Path::Direct,
            service: mesh.service_by_addr(dialled.ip()).cloned(),
            source: if outbound { own(client) } else { other.clone() },
            destination: if outbound { other } else { own(Some(server)) },
            author: (direct.kind != DirectKind::Inbound as u16).then(|| Author {
                pid: direct.pid,
                command: command(&direct.command),
                cgroup: direct.cgroup,
            }),
            tunnel: None,
            certificate_serial: None,
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        })
    }
}

/// Why the service that was dialled led nowhere.
fn why_nowhere(mesh: &Mesh, connection: &Connection) -> String {
    let dialled = connection.service.as_ref().zip(connection.destination.addr);
    let why = dialled
        .zip(connection.source.workload.as_ref())
        .and_then(|((service, addr), source)| mesh.preferred_endpoints(service, addr, &Place::of(source)).err());
    why.map_or_else(|| "the service had no endpoint".to_owned(), |why| why.to_string())
}

/// The rule by which the connection's destination, if it is an enrolled pod of this node, refuses it.
fn own_rule_against(mesh: &Mesh, connection: &Connection) -> Option<String> {
    let destination = &connection.destination;
    let workload = destination.workload.as_ref()?;
    // Towards others it is not for this node to decide.
    destination.identity.as_ref()?;
    let current = mesh.workload_by_uid(&workload.uid).unwrap_or(workload);
    forbidding_rule(mesh, current, connection)
}

fn socket(addr: Addr, port: HostPort) -> SocketAddr {
    SocketAddr::new(addr.into(), port.0)
}

fn ends(direct: &Direct) -> (SocketAddr, SocketAddr) {
    (
        socket(direct.client, direct.client_port),
        socket(direct.server, direct.server_port),
    )
}
