//! Open connections that policy has permitted here, and that a change of policy may forbid.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::record::{Connection, Path, Reporter};
use crate::identity::PeerChain;
use crate::mesh::{Mesh, MeshHandle, Workload};
use crate::policy::{self, Verdict};
use crate::relay::{Breaker, Grounds};

/// How many connections are reviewed before others have their turn.
const REVIEWED_AT_ONCE: usize = 256;

/// The permitted connections of one worker.
#[derive(Default)]
pub(super) struct Standing {
    open: RefCell<HashMap<u64, Rc<Permitted>>>,
    reviews: Cell<u64>,
}

struct Permitted {
    connection: Arc<Connection>,
    breaker: Breaker,
    /// What has proven the far end's identity, where a tunnel's handshake has.
    peer: Option<Arc<PeerChain>>,
}

/// When a connection was decided on: before or after which review.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moment(u64);

impl Standing {
    /// Now. To be asked for before the mesh is loaded by which a connection is decided on.
    pub(super) fn moment(&self) -> Moment {
        Moment(self.reviews.get())
    }

    /// A connection that was permitted is established, and is reviewed from now on. It was decided on at `decided`: if
    /// there was a review since, that has missed it.
    pub(super) fn enter(
        &self,
        connection: &Arc<Connection>,
        peer: Option<&Arc<PeerChain>>,
        decided: Moment,
        mesh: &MeshHandle,
    ) -> Standee<'_> {
        let permitted = Rc::new(Permitted {
            connection: Arc::clone(connection),
            breaker: Breaker::default(),
            peer: peer.cloned(),
        });
        if decided != self.moment() {
            permitted.review(&mesh.load());
        }
        // Where nothing has changed it costs one comparison, and what is begun while identities are reviewed is not missed.
        permitted.review_identity();
        self.open.borrow_mut().insert(connection.id, Rc::clone(&permitted));
        Standee {
            standing: self,
            permitted,
        }
    }

    /// Breaks off the connections that this mesh forbids.
    pub(super) async fn review(&self, mesh: &Mesh) {
        self.each(|permitted| permitted.review(mesh)).await;
    }

    /// Breaks off the connections whose far end's identity is proven no more.
    pub(super) async fn review_identities(&self) {
        self.each(Permitted::review_identity).await;
    }

    async fn each(&self, review: impl Fn(&Permitted)) {
        self.reviews.set(self.reviews.get() + 1);
        let open: Vec<_> = self.open.borrow().values().cloned().collect();
        for some in open.chunks(REVIEWED_AT_ONCE) {
            some.iter().for_each(|permitted| review(permitted));
            tokio::task::yield_now().await;
        }
    }
}

impl Permitted {
    fn review(&self, mesh: &Mesh) {
        if let Some(rule) = forbidden(mesh, &self.connection) {
            self.breaker.cut(Grounds::Policy, &rule);
        }
    }

    fn review_identity(&self) {
        if let Some(Err(reason)) = self.peer.as_ref().map(|peer| peer.recheck()) {
            self.breaker.cut(Grounds::Identity, &reason);
        }
    }
}

/// By which rule the mesh forbids the connection. One whose destination is not in the mesh any more ends with that's
/// enrolment.
fn forbidden(mesh: &Mesh, connection: &Connection) -> Option<String> {
    if connection.reporter == Reporter::Source && connection.path == Path::Hbone {
        // The destination's proxy decides.
        return None;
    }
    let known = connection.destination.workload.as_ref()?;
    forbidding_rule(mesh, mesh.workload_by_uid(&known.uid)?, connection)
}

/// By which rule `destination`, as it is now, refuses the connection. Where the client's address is not known, as before
/// the kernel has given it one, no rule that goes by it can have decided.
pub(super) fn forbidding_rule(mesh: &Mesh, destination: &Workload, connection: &Connection) -> Option<String> {
    let to = connection.destination.addr?;
    if destination.excludes_inbound(to.port()) {
        return None;
    }
    let request = policy::Request {
        source: connection.source.identity.as_ref(),
        source_ip: connection.source.addr.unwrap_or(to).ip(),
        destination_ip: to.ip(),
        destination_port: to.port(),
    };
    match policy::evaluate(mesh.policies(), destination, &request).verdict {
        Verdict::Allow { .. } => None,
        Verdict::Deny { rule } => Some(rule.to_string()),
    }
}

/// A connection's place among those reviewed; it is given up with this.
pub(super) struct Standee<'a> {
    standing: &'a Standing,
    permitted: Rc<Permitted>,
}

impl Standee<'_> {
    /// What breaks the connection's relay off.
    pub(super) fn breaker(&self) -> &Breaker {
        &self.permitted.breaker
    }
}

impl Drop for Standee<'_> {
    fn drop(&mut self) {
        let mut open = self.standing.open.borrow_mut();
        open.remove(&self.permitted.connection.id);
        // After a wave of connections its room goes back.
        if open.capacity() > 256 && open.len() < open.capacity() / 8 {
            open.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::{Duration, Instant, SystemTime};

    use super::*;
    use crate::dataplane::record::Peer;
    use crate::identity::{SpiffeId, TrustDomain};
    use crate::mesh::{Action, Clause, Match, MeshParts, Policy, Rule, Scope, test_workload};

    const CART: &str = "spiffe://cluster.local/ns/shop/sa/cart";
    const WEB: &str = "spiffe://cluster.local/ns/shop/sa/web";

    fn mesh(denied: Option<Match>) -> Mesh {
        let mut parts = MeshParts::new(TrustDomain::parse("cluster.local").unwrap(), "cluster.local");
        parts.workloads.push(test_workload("shop", "db", "10.0.0.1"));
        parts.policies.extend(denied.map(|conditions| {
            let clauses = vec![Clause {
                matches: vec![conditions],
            }];
            Policy::new("shop", "closed", Scope::Namespace, Action::Deny, vec![Rule { clauses }])
        }));
        Mesh::build(parts).unwrap()
    }

    fn from(uri: &str) -> Match {
        let principal = uri.strip_prefix("spiffe://").unwrap();
        Match {
            principals: vec![principal.parse().unwrap()],
            ..Match::default()
        }
    }

    fn connection(id: u64, uri: Option<&str>) -> Arc<Connection> {
        let peer = |addr: &str| Peer {
            addr: Some(addr.parse().unwrap()),
            workload: None,
            identity: None,
        };
        Arc::new(Connection {
            id,
            opened: SystemTime::UNIX_EPOCH,
            reporter: Reporter::Destination,
            path: Path::Hbone,
            source: Peer {
                identity: uri.map(|uri| SpiffeId::parse(uri).unwrap()),
                ..peer("10.0.0.9:40000")
            },
            destination: Peer {
                workload: Some(Arc::new(test_workload("shop", "db", "10.0.0.1"))),
                ..peer("10.0.0.1:5432")
            },
            service: None,
            author: None,
            tunnel: None,
            certificate_serial: None,
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        })
    }

    #[tokio::test]
    async fn only_what_is_now_forbidden_is_cut_and_by_which_rule() {
        let (standing, handle) = (Standing::default(), MeshHandle::new(mesh(None)));
        let decided = standing.moment();
        let enter = |id, uri| standing.enter(&connection(id, uri), None, decided, &handle);
        let (cart, web, nobody) = (enter(1, Some(CART)), enter(2, Some(WEB)), enter(3, None));
        let all = [&cart, &web, &nobody];
        let cut = || all.map(|standee| standee.breaker().reason());
        standing.review(&mesh(None)).await;
        assert_eq!(cut(), [None, None, None]);
        let rule = Some("deny: shop/closed rule 0".to_owned());
        standing.review(&mesh(Some(from(CART)))).await;
        assert_eq!(cut(), [rule.clone(), None, None]);
        let anonymous = Match {
            not_principals: vec!["*".parse().unwrap()],
            ..Match::default()
        };
        standing.review(&mesh(Some(anonymous))).await;
        assert_eq!(cut(), [rule.clone(), None, rule]);
    }

    #[tokio::test]
    async fn a_review_between_decision_and_establishment_is_made_up_for() {
        let (standing, handle) = (Standing::default(), MeshHandle::new(mesh(None)));
        let decided = standing.moment();
        handle.publish(mesh(Some(from(CART))));
        standing.review(&handle.load()).await;
        let late = standing.enter(&connection(1, Some(CART)), None, decided, &handle);
        assert!(late.breaker().reason().is_some());
    }

    #[tokio::test]
    async fn what_has_ended_is_forgotten() {
        let (standing, handle) = (Standing::default(), MeshHandle::new(mesh(None)));
        drop(standing.enter(&connection(1, None), None, standing.moment(), &handle));
        assert!(standing.open.borrow().is_empty());
    }

    #[tokio::test]
    async fn five_thousand_are_reviewed_within_a_fraction_of_a_second() {
        let (standing, handle) = (Standing::default(), MeshHandle::new(mesh(None)));
        let decided = standing.moment();
        let connections: Vec<_> = (0..5_000).map(|id| connection(id, Some(CART))).collect();
        let standees: Vec<_> = connections
            .iter()
            .map(|connection| standing.enter(connection, None, decided, &handle))
            .collect();
        let closed = mesh(Some(from(CART)));
        let start = Instant::now();
        standing.review(&closed).await;
        let took = start.elapsed();
        println!("{took:?}");
        assert!(standees.iter().all(|standee| standee.breaker().reason().is_some()));
        assert!(took < Duration::from_millis(250), "{took:?}");
    }

    #[test]
    fn a_permitted_connection_takes_few_bytes_more() {
        assert!(size_of::<(u64, Rc<Permitted>)>() + size_of::<Permitted>() <= 64);
    }
}
