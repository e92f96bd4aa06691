//! Services, resolved by their slices of endpoints.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::objects;
use super::strings::Strings;
use crate::mesh::{ResolvedEndpoint, Service, ServiceEndpoint, ServicePort, TargetPort};

/// Some of a service's endpoints, kept.
#[derive(Debug, PartialEq)]
pub(super) struct Slice {
    pub(super) name: String,
    pub(super) namespace: Arc<str>,
    /// The TCP ports by name.
    ports: Vec<(Arc<str>, u16)>,
    /// Without their ports.
    endpoints: Vec<ResolvedEndpoint>,
}

impl Slice {
    pub(super) fn new(slice: objects::Slice, strings: &mut Strings) -> Self {
        let no_ports: Arc<[(u16, u16)]> = Arc::from([]);
        let mut endpoints = Vec::with_capacity(slice.endpoints.len());
        for endpoint in slice.endpoints {
            endpoints.push(ResolvedEndpoint {
                workload: endpoint.pod.map(Into::into),
                address: endpoint.address,
                readiness: endpoint.readiness,
                node: strings.share(&endpoint.node),
                zone: strings.share(&endpoint.zone),
                ports: Arc::clone(&no_ports),
            });
        }
        Self {
            name: slice.name,
            namespace: strings.share(&slice.namespace),
            ports: slice
                .ports
                .iter()
                .map(|(name, port)| (strings.share(name), *port))
                .collect(),
            endpoints,
        }
    }
}

/// The service with all its endpoints, each by its slice's ports. One that two slices name, as while it moves from one to
/// the other, is there once, and ready where one says so.
pub(super) fn resolve<'a>(
    service: &objects::Service,
    slices: impl Iterator<Item = &'a Slice>,
    cluster_domain: &str,
    strings: &mut Strings,
) -> Service {
    let mut endpoints: BTreeMap<_, ResolvedEndpoint> = BTreeMap::new();
    for slice in slices {
        let target = |name: &str| {
            slice
                .ports
                .iter()
                .find(|(known, _)| **known == *name)
                .map(|(_, port)| *port)
        };
        let ports = service
            .ports
            .iter()
            .filter_map(|(name, port)| Some((*port, target(name)?)));
        let ports: Arc<[(u16, u16)]> = ports.collect();
        if ports.is_empty() {
            continue;
        }
        for endpoint in &slice.endpoints {
            let resolved = ResolvedEndpoint {
                ports: Arc::clone(&ports),
                ..endpoint.clone()
            };
            let known = endpoints
                .entry((endpoint.address, Arc::clone(&ports)))
                .or_insert_with(|| resolved.clone());
            if resolved.readiness < known.readiness {
                *known = resolved;
            }
        }
    }
    let (namespace, name) = (strings.share(&service.namespace), strings.share(&service.name));
    let mut ports: Vec<ServicePort> = Vec::with_capacity(service.ports.len());
    for (_, port) in &service.ports {
        ports.push(ServicePort {
            port: *port,
            // Each endpoint has its own.
            target: TargetPort::Number(*port),
        });
    }
    Service {
        hostname: strings.share(&format!("{name}.{namespace}.svc.{cluster_domain}")),
        name,
        namespace,
        addresses: service.addresses.clone(),
        ports,
        distribution: service.distribution,
        affinity: service.affinity,
        endpoints: endpoints.into_values().map(ServiceEndpoint::Resolved).collect(),
    }
}
