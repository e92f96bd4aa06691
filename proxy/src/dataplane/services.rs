//! The endpoints of services that the kernel is to choose from.
//!
//! The lists are those of this node: all its pods are at one place, so that the same endpoints are near to all of them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use adit_common::{Addr, Cached, Endpoint, EndpointKey, EndpointList, HostPort, MAX_ENDPOINTS_OF_PORT, ServiceKey};

use crate::mesh::{EndpointError, Mesh, Place, Protocol, Service, ServiceEndpoint};
use crate::steer::{ServiceMaps, SteerError};

/// How long the endpoints of a list stay after it was last named: far longer than a kernel program runs that has read
/// the name.
const GRACE: Duration = Duration::from_secs(1);

/// The endpoints by port of a virtual address. One without endpoints leads nowhere; one that is not there is asked.
pub(super) type Lists = HashMap<ServiceKey, Vec<Endpoint>>;

/// What the kernel is to hold of services.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    /// What holds of virtual addresses.
    pub(super) addresses: HashMap<Addr, Cached>,
    /// The lists of those of which these say.
    pub(super) lists: Lists,
}

/// What follows from the mesh for connections from a place; without one the proxy chooses.
pub(super) fn wanted(mesh: &Mesh, place: Option<&Place<'_>>) -> Wanted {
    let mut wanted = Wanted::default();
    for service in mesh.services() {
        for ip in &service.addresses {
            let verdict = match place {
                _ if is_outside(mesh, service) => Cached::Allow,
                None => Cached::Ask,
                // The kernel chooses at random.
                Some(_) if service.affinity => Cached::Ask,
                Some(place) => {
                    wanted.lists.extend(lists(mesh, service, *ip, place));
                    Cached::Service
                }
            };
            wanted.addresses.insert((*ip).into(), verdict);
        }
    }
    wanted
}

/// Whether the service leads outside the mesh alone: the cluster's own load balancer serves it then. Of an endpoint that
/// is not known yet nobody can say so.
fn is_outside(mesh: &Mesh, service: &Service) -> bool {
    let plain = |endpoint: &ServiceEndpoint| match endpoint {
        ServiceEndpoint::Workload(uid) => mesh
            .workload_by_uid(uid)
            .is_some_and(|workload| workload.protocol == Protocol::Plain),
        ServiceEndpoint::Resolved(resolved) => mesh
            .behind(resolved)
            .is_some_and(|behind| behind.is_none_or(|workload| workload.protocol == Protocol::Plain)),
    };
    !service.endpoints.is_empty() && service.endpoints.iter().all(plain)
}

/// The lists of a virtual address.
fn lists<'a>(
    mesh: &'a Mesh,
    service: &'a Service,
    ip: IpAddr,
    place: &'a Place<'a>,
) -> impl Iterator<Item = (ServiceKey, Vec<Endpoint>)> + 'a {
    service.ports.iter().filter_map(move |port| {
        let endpoints = match mesh.preferred_endpoints(service, SocketAddr::new(ip, port.port), place) {
            Ok(endpoints) => endpoints,
            Err(EndpointError::NoEndpoints { .. }) => Vec::new(),
            Err(EndpointError::UnknownPort { .. }) => return None,
        };
        let endpoints = endpoints
            .into_iter()
            .map(|(_, addr)| Endpoint::new(addr.ip().into(), HostPort(addr.port())));
        let key = ServiceKey::new(ip.into(), HostPort(port.port));
        Some((key, endpoints.collect()))
    })
}

/// The kernel's lists: what it has been told, so that only differences are told.
pub(super) struct Services {
    maps: ServiceMaps,
    told: HashMap<ServiceKey, Told>,
    /// The places of lists that are not named any more, and since when.
    retired: VecDeque<(Instant, Vec<EndpointKey>)>,
    next_number: u32,
}

struct Told {
    list: EndpointList,
    endpoints: Vec<Endpoint>,
}

impl Services {
    pub(super) fn maps(&self) -> ServiceMaps {
        self.maps.clone()
    }

    /// Forgets what the kernel holds already. To be called when no address leads to a list.
    pub(super) fn take_over(maps: ServiceMaps) -> Result<Self, SteerError> {
        for service in maps.lists()?.into_keys() {
            maps.remove_list(service)?;
        }
        let left: Vec<EndpointKey> = maps.endpoints()?.into_keys().collect();
        Ok(Self {
            maps,
            told: HashMap::new(),
            next_number: left
                .iter()
                .map(|key| key.list.wrapping_add(1))
                .max()
                .unwrap_or_default(),
            retired: VecDeque::from([(Instant::now(), left)]),
        })
    }

    /// The virtual addresses of which a list is not yet as wanted.
    pub(super) fn changing(&self, wanted: &Lists) -> HashSet<Addr> {
        let differs = |key: &&ServiceKey| self.told.get(*key).map(|told| &told.endpoints) != wanted.get(*key);
        let keys = self.told.keys().chain(wanted.keys());
        keys.filter(differs).map(|key| key.addr).collect()
    }

    /// Makes the lists those wanted. Each is there in whole before it is named; a port whose list finds no room is asked,
    /// and the log says so.
    pub(super) fn tell(&mut self, wanted: Lists) -> Result<(), SteerError> {
        self.forget_retired()?;
        let unwanted: Vec<ServiceKey> = self
            .told
            .keys()
            .filter(|key| !wanted.contains_key(key))
            .copied()
            .collect();
        for service in unwanted {
            self.remove(service)?;
        }
        let mut full = None;
        for (service, endpoints) in wanted {
            if self.told.get(&service).is_some_and(|told| told.endpoints == endpoints) {
                continue;
            }
            if let Err(error) = self.replace(service, endpoints) {
                self.remove(service)?;
                let (count, _) = full.get_or_insert((0, error));
                *count += 1;
            }
        }
        if let Some((count, error)) = full {
            tracing::warn!("the choice of endpoints for {count} ports of services stays with the proxy: {error}");
        }
        Ok(())
    }

    fn replace(&mut self, service: ServiceKey, endpoints: Vec<Endpoint>) -> Result<(), SteerError> {
        if endpoints.len() > MAX_ENDPOINTS_OF_PORT {
            return Err(SteerError::TooManyEndpoints {
                count: endpoints.len(),
                most: MAX_ENDPOINTS_OF_PORT,
            });
        }
        let list = EndpointList {
            number: self.next_number,
            count: endpoints.len() as u32,
        };
        self.next_number = self.next_number.wrapping_add(1);
        let written = keys(service, list)
            .zip(&endpoints)
            .try_for_each(|(key, endpoint)| self.maps.set_endpoint(key, *endpoint))
            .and_then(|()| self.maps.set_list(service, list));
        if let Err(error) = written {
            // Nobody has heard of this list.
            for key in keys(service, list) {
                self.maps.remove_endpoint(key)?;
            }
            return Err(error);
        }
        if let Some(before) = self.told.insert(service, Told { list, endpoints }) {
            self.retire(service, before.list);
        }
        Ok(())
    }

    fn remove(&mut self, service: ServiceKey) -> Result<(), SteerError> {
        if let Some(told) = self.told.get(&service) {
            let list = told.list;
            self.maps.remove_list(service)?;
            self.told.remove(&service);
            self.retire(service, list);
        }
        Ok(())
    }

    fn retire(&mut self, service: ServiceKey, list: EndpointList) {
        if list.count > 0 {
            self.retired.push_back((Instant::now(), keys(service, list).collect()));
        }
    }

    fn forget_retired(&mut self) -> Result<(), SteerError> {
        while let Some((since, places)) = self.retired.front()
            && since.elapsed() >= GRACE
        {
            for place in places {
                self.maps.remove_endpoint(*place)?;
            }
            self.retired.pop_front();
        }
        Ok(())
    }
}

/// The places of a list.
fn keys(service: ServiceKey, list: EndpointList) -> impl Iterator<Item = EndpointKey> {
    (0..list.count).map(move |index| EndpointKey {
        addr: service.addr,
        list: list.number,
        port: service.port,
        index: index as u16,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{MeshParts, ServicePort, TargetPort, TrafficDistribution, Workload, test_parts, test_workload};

    fn service(name: &str, address: &str, endpoints: &[&str]) -> Service {
        Service {
            name: name.into(),
            namespace: "shop".into(),
            hostname: name.into(),
            addresses: vec![address.parse().unwrap()],
            ports: vec![ServicePort {
                port: 80,
                target: TargetPort::Number(8080),
            }],
            distribution: TrafficDistribution::Any,
            affinity: false,
            endpoints: endpoints
                .iter()
                .map(|uid| ServiceEndpoint::Workload((*uid).into()))
                .collect(),
        }
    }

    fn plain(name: &str, address: &str) -> Workload {
        Workload {
            protocol: Protocol::Plain,
            ..test_workload("shop", name, address)
        }
    }

    fn mesh(workloads: Vec<Workload>, services: Vec<Service>) -> Mesh {
        Mesh::build(MeshParts {
            workloads,
            services,
            ..test_parts()
        })
        .unwrap()
    }

    const HERE: Place<'static> = Place { node: "n1", zone: "" };

    fn key(address: &str) -> ServiceKey {
        ServiceKey::new(address.parse::<IpAddr>().unwrap().into(), HostPort(80))
    }

    fn endpoint(address: &str) -> Endpoint {
        Endpoint::new(address.parse::<IpAddr>().unwrap().into(), HostPort(8080))
    }

    #[test]
    fn a_service_leads_to_its_ready_endpoints_within_and_outside_the_mesh() {
        let mut not_ready = test_workload("shop", "c", "10.0.0.3");
        not_ready.ready = false;
        let mesh = mesh(
            vec![
                test_workload("shop", "a", "10.0.0.1"),
                plain("b", "10.0.0.2"),
                not_ready,
            ],
            vec![service("s", "10.96.0.1", &["shop/a", "shop/b", "shop/c"])],
        );
        let wanted = wanted(&mesh, Some(&HERE));
        assert_eq!(wanted.addresses[&key("10.96.0.1").addr], Cached::Service);
        assert_eq!(
            wanted.lists[&key("10.96.0.1")],
            [endpoint("10.0.0.1"), endpoint("10.0.0.2")]
        );
    }

    #[test]
    fn only_a_service_that_certainly_leads_outside_the_mesh_alone_is_left_to_the_cluster() {
        let mesh = mesh(
            vec![test_workload("shop", "a", "10.0.0.1"), plain("b", "10.0.0.2")],
            vec![
                service("out", "10.96.0.1", &["shop/b"]),
                service("unknown", "10.96.0.2", &["shop/b", "shop/coming"]),
                service("mixed", "10.96.0.3", &["shop/b", "shop/a"]),
                service("none", "10.96.0.4", &[]),
            ],
        );
        let wanted = wanted(&mesh, Some(&HERE));
        for (address, verdict, count) in [
            ("10.96.0.1", Cached::Allow, None),
            ("10.96.0.2", Cached::Service, Some(1)),
            ("10.96.0.3", Cached::Service, Some(2)),
            ("10.96.0.4", Cached::Service, Some(0)),
        ] {
            assert_eq!(wanted.addresses[&key(address).addr], verdict, "{address}");
            assert_eq!(wanted.lists.get(&key(address)).map(Vec::len), count, "{address}");
        }
    }

    #[test]
    fn without_a_place_that_all_pods_share_the_proxy_chooses() {
        let mesh = mesh(
            vec![test_workload("shop", "a", "10.0.0.1")],
            vec![service("s", "10.96.0.1", &["shop/a"])],
        );
        let wanted = wanted(&mesh, None);
        assert_eq!(wanted.addresses[&key("10.96.0.1").addr], Cached::Ask);
        assert!(wanted.lists.is_empty());
    }
}
