//! Which endpoints one connection to a service may go to, and in which order.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use thiserror::Error;

use super::{
    Mesh, Protocol, Readiness, ResolvedEndpoint, Service, ServiceEndpoint, ServicePort, TargetPort,
    TrafficDistribution, Workload,
};

/// Where to reach an endpoint, and the workload that is there, where it is one.
pub type Endpoint = (Option<Arc<Workload>>, SocketAddr);

/// How near an endpoint is, and whether it is of another address family than the one dialled.
type Preference = (u8, bool);

/// Where a connection comes from, as far as the choice of an endpoint goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<'a> {
    /// The node's name; empty where unknown.
    pub node: &'a str,
    /// The zone; empty where unknown.
    pub zone: &'a str,
}

impl<'a> Place<'a> {
    /// Where a workload is.
    pub fn of(workload: &'a Workload) -> Self {
        Self {
            node: &workload.node,
            zone: &workload.zone,
        }
    }
}

/// Why a service leads nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the fields are named in the messages")]
pub enum EndpointError {
    /// The service does not have the port that was dialled.
    #[error("service {service} has no port {port}")]
    UnknownPort { service: Arc<str>, port: u16 },
    /// No endpoint is there, ready, has the target port and is where the service wants it.
    #[error("service {service} port {port}: none of {known} endpoints can be used, {ready} are ready")]
    NoEndpoints {
        service: Arc<str>,
        port: u16,
        known: usize,
        ready: usize,
    },
}

impl Mesh {
    /// The endpoints for one connection from `source` to an address and port of the service, in the order in which to try
    /// them: the most preferred first, at random among equals, those of the address family that was dialled before others.
    /// Where the service wants it, a source has its equals always in the same order.
    pub fn endpoints(
        &self,
        service: &Service,
        dialled: SocketAddr,
        source: &Workload,
        rng: &mut fastrand::Rng,
    ) -> Result<Vec<Endpoint>, EndpointError> {
        let mut candidates = self.candidates(service, dialled, &Place::of(source))?;
        if service.affinity {
            let client = source.address_like(dialled.ip());
            candidates
                .sort_by_cached_key(|(preference, (_, addr))| (*preference, affinity(client, &source.uid, *addr)));
        } else {
            // Shuffled whole, then sorted stably: uniform within each rank.
            rng.shuffle(&mut candidates);
            candidates.sort_by_key(|(preference, _)| *preference);
        }
        Ok(candidates.into_iter().map(|(_, endpoint)| endpoint).collect())
    }

    /// The endpoints of which any may come first in [`Mesh::endpoints`], for a source at that place; in the service's
    /// order.
    pub fn preferred_endpoints(
        &self,
        service: &Service,
        dialled: SocketAddr,
        source: &Place<'_>,
    ) -> Result<Vec<Endpoint>, EndpointError> {
        let candidates = self.candidates(service, dialled, source)?;
        let best = candidates.iter().map(|(preference, _)| *preference).min();
        let best = candidates
            .into_iter()
            .filter(|(preference, _)| Some(*preference) == best);
        Ok(best.map(|(_, endpoint)| endpoint).collect())
    }

    /// The endpoints that may be used, each with how much it is preferred, least is best; at least one.
    fn candidates(
        &self,
        service: &Service,
        dialled: SocketAddr,
        source: &Place<'_>,
    ) -> Result<Vec<(Preference, Endpoint)>, EndpointError> {
        let port = service
            .ports
            .iter()
            .find(|port| port.port == dialled.port())
            .ok_or_else(|| EndpointError::UnknownPort {
                service: Arc::clone(&service.hostname),
                port: dialled.port(),
            })?;
        let mut ready = 0;
        let mut candidates: Vec<(Preference, Endpoint)> = Vec::with_capacity(service.endpoints.len());
        let mut draining = Vec::new();
        for endpoint in &service.endpoints {
            let Some(found) = self.usable(service, port, endpoint, dialled.ip(), source) else {
                continue;
            };
            ready += usize::from(found.readiness == Readiness::Ready);
            if let Some(candidate) = found.candidate {
                match found.readiness {
                    Readiness::Ready => candidates.push(candidate),
                    _ => draining.push(candidate),
                }
            }
        }
        if candidates.is_empty() {
            candidates = draining;
        }
        if candidates.is_empty() {
            return Err(EndpointError::NoEndpoints {
                service: Arc::clone(&service.hostname),
                port: dialled.port(),
                known: service.endpoints.len(),
                ready,
            });
        }
        Ok(candidates)
    }

    /// One endpoint, if it is there and serves.
    fn usable(
        &self,
        service: &Service,
        port: &ServicePort,
        endpoint: &ServiceEndpoint,
        dialled: IpAddr,
        source: &Place<'_>,
    ) -> Option<Found> {
        match endpoint {
            ServiceEndpoint::Workload(uid) => {
                let workload = self.workload_by_uid(uid).filter(|workload| workload.ready)?;
                let candidate = || {
                    let rank = rank(service.distribution, &Place::of(workload), source)?;
                    let (address, other_family) = address(workload, dialled)?;
                    let to = SocketAddr::new(address, target(&port.target, workload)?);
                    Some(((rank, other_family), (Some(Arc::clone(workload)), to)))
                };
                Some(Found {
                    readiness: Readiness::Ready,
                    candidate: candidate(),
                })
            }
            ServiceEndpoint::Resolved(resolved) => {
                if resolved.readiness == Readiness::NotReady {
                    return None;
                }
                let workload = self.behind(resolved)?;
                let place = Place {
                    node: &resolved.node,
                    zone: &resolved.zone,
                };
                let candidate = || {
                    let rank = rank(service.distribution, &place, source)?;
                    let other_family = resolved.address.is_ipv4() != dialled.to_canonical().is_ipv4();
                    let (_, to) = resolved.ports.iter().find(|(from, _)| *from == port.port)?;
                    let to = SocketAddr::new(resolved.address, *to);
                    Some(((rank, other_family), (workload.cloned(), to)))
                };
                Some(Found {
                    readiness: resolved.readiness,
                    candidate: candidate(),
                })
            }
        }
    }

    /// The workload behind an endpoint's address, which may be none; nothing where that cannot be told yet: the workload is
    /// not known, or not known to have the address.
    pub fn behind(&self, endpoint: &ResolvedEndpoint) -> Option<Option<&Arc<Workload>>> {
        match (self.workload_by_addr(endpoint.address), &endpoint.workload) {
            (Some(owner), None) => Some(Some(owner)),
            (Some(owner), Some(uid)) => (owner.uid == *uid).then_some(Some(owner)),
            (None, None) => Some(None),
            // A pod of the host's network has its node's address, and none of its own.
            (None, Some(uid)) => {
                let workload = self.workload_by_uid(uid)?;
                (workload.protocol == Protocol::Plain).then_some(Some(workload))
            }
        }
    }
}

/// An endpoint that serves.
struct Found {
    readiness: Readiness,
    /// None where this connection cannot go there.
    candidate: Option<(Preference, Endpoint)>,
}

/// Where an endpoint stands in the order of a client's own: rendezvous hashing, so that only the clients of an endpoint
/// that goes are sent elsewhere. The same in every process, now and later.
fn affinity(client: Option<IpAddr>, uid: &str, endpoint: SocketAddr) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    match client {
        Some(IpAddr::V4(ip)) => add(&ip.octets()),
        Some(IpAddr::V6(ip)) => add(&ip.octets()),
        None => add(uid.as_bytes()),
    }
    match endpoint.ip() {
        IpAddr::V4(ip) => add(&ip.octets()),
        IpAddr::V6(ip) => add(&ip.octets()),
    }
    add(&endpoint.port().to_be_bytes());
    // What differs in the last byte alone is to differ everywhere.
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

/// How near an endpoint is, 0 the nearest; `None` where it must not be used. Unknown places are never near.
fn rank(distribution: TrafficDistribution, endpoint: &Place<'_>, source: &Place<'_>) -> Option<u8> {
    let same = |a: &str, b: &str| !a.is_empty() && a == b;
    let node = same(endpoint.node, source.node);
    let zone = same(endpoint.zone, source.zone);
    match distribution {
        TrafficDistribution::Any => Some(0),
        TrafficDistribution::PreferSameNode if node => Some(0),
        TrafficDistribution::PreferSameNode if zone => Some(1),
        TrafficDistribution::PreferSameNode => Some(2),
        TrafficDistribution::PreferSameZone => Some(u8::from(!(zone || node))),
        TrafficDistribution::SameNodeOnly => node.then_some(0),
    }
}

/// The workload's address to dial, and whether it is of another family than the one dialled.
fn address(workload: &Workload, dialled: IpAddr) -> Option<(IpAddr, bool)> {
    match workload.address_like(dialled) {
        Some(address) => Some((address, false)),
        None => workload.addresses.first().map(|address| (*address, true)),
    }
}

fn target(target: &TargetPort, workload: &Workload) -> Option<u16> {
    match target {
        TargetPort::Number(port) => Some(*port),
        TargetPort::Name(name) => workload.ports.get(name).copied(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use super::*;
    use crate::mesh::snapshot::tests::{parts, service, workload};

    /// Endpoints `a` (source's node), `b` (its zone), `c` (elsewhere), `d` (the node, not ready).
    fn mesh(distribution: TrafficDistribution) -> (Mesh, Arc<Service>, Workload) {
        let at = |name: &str, node: &str, zone: &str, address: &str| {
            let mut workload = workload("shop", name, address);
            (workload.node, workload.zone) = (node.into(), zone.into());
            workload.ports.insert("http".into(), 8080);
            workload
        };
        let mut parts = parts();
        let mut not_ready = at("d", "n1", "z1", "10.0.0.4");
        not_ready.ready = false;
        parts.workloads = vec![
            at("a", "n1", "z1", "10.0.0.1"),
            at("b", "n2", "z1", "10.0.0.2"),
            at("c", "n3", "z2", "10.0.0.3"),
            not_ready,
        ];
        let mut service = service(
            "shop",
            "s",
            "10.96.0.1",
            &["shop/a", "shop/b", "shop/c", "shop/d", "shop/gone"],
        );
        service.distribution = distribution;
        parts.services = vec![service];
        let mesh = Mesh::build(parts).unwrap();
        let service = Arc::clone(mesh.service_by_name("shop/s").unwrap());
        (mesh, service, at("client", "n1", "z1", "10.0.0.9"))
    }

    fn order(mesh: &Mesh, service: &Service, source: &Workload, seed: u64) -> Vec<String> {
        mesh.endpoints(
            service,
            "10.96.0.1:80".parse().unwrap(),
            source,
            &mut fastrand::Rng::with_seed(seed),
        )
        .unwrap()
        .iter()
        .map(|(workload, _)| workload.as_ref().unwrap().name.to_string())
        .collect()
    }

    #[test]
    fn near_endpoints_come_first_and_the_others_follow_as_fallback() {
        for seed in 0..50 {
            let (m, s, source) = mesh(TrafficDistribution::PreferSameNode);
            assert_eq!(order(&m, &s, &source, seed), ["a", "b", "c"]);
            let (m, s, source) = mesh(TrafficDistribution::PreferSameZone);
            assert_eq!(order(&m, &s, &source, seed)[2], "c");
            let (m, s, source) = mesh(TrafficDistribution::SameNodeOnly);
            assert_eq!(order(&m, &s, &source, seed), ["a"]);
        }
    }

    #[test]
    fn equals_are_chosen_uniformly() {
        let (mesh, service, source) = mesh(TrafficDistribution::Any);
        let mut first: HashMap<String, usize> = HashMap::new();
        for seed in 0..3000 {
            *first
                .entry(order(&mesh, &service, &source, seed)[0].clone())
                .or_default() += 1;
        }
        assert_eq!(first.len(), 3);
        assert!(first.values().all(|count| (850..1150).contains(count)), "{first:?}");
    }

    #[test]
    fn places_that_are_unknown_are_not_near() {
        let (mesh, service, mut source) = mesh(TrafficDistribution::SameNodeOnly);
        source.node = "".into();
        let dialled = "10.96.0.1:80".parse().unwrap();
        assert_eq!(
            mesh.endpoints(&service, dialled, &source, &mut fastrand::Rng::new()),
            Err(EndpointError::NoEndpoints {
                service: "s.shop.svc.cluster.local".into(),
                port: 80,
                known: 5,
                ready: 3
            })
        );
    }

    #[test]
    fn a_port_that_the_service_lacks_is_unknown() {
        let (mesh, service, source) = mesh(TrafficDistribution::Any);
        assert_eq!(
            mesh.endpoints(
                &service,
                "10.96.0.1:81".parse().unwrap(),
                &source,
                &mut fastrand::Rng::new()
            ),
            Err(EndpointError::UnknownPort {
                service: "s.shop.svc.cluster.local".into(),
                port: 81
            })
        );
    }

    #[test]
    fn named_target_ports_are_each_endpoints_own() {
        let (mesh, service, source) = mesh(TrafficDistribution::SameNodeOnly);
        let named = |name: &str| {
            let mut service = Service::clone(&service);
            service.ports[0].target = TargetPort::Name(name.into());
            let dialled = "10.96.0.1:80".parse().unwrap();
            mesh.endpoints(&service, dialled, &source, &mut fastrand::Rng::new())
        };
        assert_eq!(named("http").unwrap()[0].1, "10.0.0.1:8080".parse().unwrap());
        assert!(matches!(
            named("grpc"),
            Err(EndpointError::NoEndpoints { ready: 3, .. })
        ));
    }

    #[test]
    fn the_address_family_that_was_dialled_is_preferred() {
        let mut parts = parts();
        let mut dual = workload("shop", "dual", "10.0.0.1");
        dual.addresses.push("fd00::1".parse().unwrap());
        parts.workloads = vec![dual, workload("shop", "v4", "10.0.0.2")];
        let mut both = service("shop", "s", "10.96.0.1", &["shop/v4", "shop/dual"]);
        both.addresses.push("fd96::1".parse().unwrap());
        parts.services = vec![both];
        let mesh = Mesh::build(parts).unwrap();
        let service = mesh.service_by_name("shop/s").unwrap();
        let source = workload("shop", "client", "10.0.0.9");
        let dial = |dialled: &str, seed| {
            let mut rng = fastrand::Rng::with_seed(seed);
            mesh.endpoints(service, dialled.parse().unwrap(), &source, &mut rng)
                .unwrap()
        };
        for seed in 0..20 {
            let addresses: Vec<_> = dial("[fd96::1]:80", seed)
                .into_iter()
                .map(|(_, a)| a.to_string())
                .collect();
            assert_eq!(addresses, ["[fd00::1]:8080", "10.0.0.2:8080"]);
            assert!(dial("10.96.0.1:80", seed).iter().all(|(_, address)| address.is_ipv4()));
            assert!(
                dial("[::ffff:10.96.0.1]:80", seed)
                    .iter()
                    .all(|(_, address)| address.is_ipv4())
            );
        }
    }

    #[test]
    fn the_preferred_are_those_that_come_first() {
        let mut rng = fastrand::Rng::with_seed(4);
        for round in 0..300 {
            let (nodes, zones) = (["", "n1", "n2", "n3"], ["", "z1", "z2"]);
            let mut parts = parts();
            let count = rng.usize(0..7);
            let names: Vec<String> = (0..count).map(|n| format!("w{n}")).collect();
            for (n, name) in names.iter().enumerate() {
                let mut workload = workload("shop", name, &format!("10.0.0.{}", n + 1));
                let v6 = format!("fd00::{}", n + 1).parse().unwrap();
                match rng.u8(0..3) {
                    0 => workload.addresses = vec![v6],
                    1 => workload.addresses.push(v6),
                    _ => {}
                }
                workload.node = nodes[rng.usize(0..nodes.len())].into();
                workload.zone = zones[rng.usize(0..zones.len())].into();
                workload.ready = rng.u8(0..4) > 0;
                if rng.bool() {
                    workload.ports.insert("http".into(), 8000 + n as u16);
                }
                parts.workloads.push(workload);
            }
            let uids: Vec<String> = names.iter().map(|name| format!("shop/{name}")).collect();
            let mut service = service(
                "shop",
                "s",
                "10.96.0.1",
                &uids.iter().map(String::as_str).collect::<Vec<_>>(),
            );
            service.addresses.push("fd96::1".parse().unwrap());
            service.distribution = [
                TrafficDistribution::Any,
                TrafficDistribution::PreferSameNode,
                TrafficDistribution::PreferSameZone,
                TrafficDistribution::SameNodeOnly,
            ][rng.usize(0..4)];
            if rng.bool() {
                service.ports[0].target = TargetPort::Name("http".into());
            }
            parts.services = vec![service];
            let mesh = Mesh::build(parts).unwrap();
            let service = mesh.service_by_name("shop/s").unwrap();
            let mut source = workload("shop", "client", "10.0.0.99");
            source.node = nodes[rng.usize(0..nodes.len())].into();
            source.zone = zones[rng.usize(0..zones.len())].into();
            for dialled in ["10.96.0.1:80", "[fd96::1]:80", "10.96.0.1:81"] {
                let dialled = dialled.parse().unwrap();
                let first: Result<BTreeSet<SocketAddr>, EndpointError> = (0..60)
                    .map(|_| Ok(mesh.endpoints(service, dialled, &source, &mut rng)?[0].1))
                    .collect();
                let preferred = mesh
                    .preferred_endpoints(service, dialled, &Place::of(&source))
                    .map(|endpoints| endpoints.into_iter().map(|(_, address)| address).collect());
                assert_eq!(preferred, first, "round {round}, {dialled}, {service:?}");
            }
        }
    }
}
