//! What a change of the mesh, or of a pod, means for the pod's enrolment.

use std::net::IpAddr;
use std::sync::Arc;

use super::enrol::Enrolled;
use crate::mesh::Workload;

/// What has to be done about a pod that is enrolled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    None,
    /// The kernel must be told of addresses. What is open goes on.
    Addresses,
    /// The same of what is left alone, now or no more.
    Exclusions,
    /// It is to be enrolled anew: it has another identity or namespace, or its connections another way.
    Anew,
}

/// What has to be done about a pod that is enrolled, by what the mesh says of it.
pub(super) fn change(pod: &Enrolled, now: &Workload) -> Change {
    let old = &pod.workload;
    let anew = old.identity != now.identity || old.netns != now.netns || old.same_node != now.same_node;
    match &pod.found {
        _ if anew => Change::Anew,
        None if pod.addresses != now.addresses => Change::Anew,
        _ if old.exclusions != now.exclusions => Change::Exclusions,
        Some(_) if !covers(&pod.addresses, &now.addresses) => Change::Addresses,
        _ => Change::None,
    }
}

/// Whether a pod that is enrolled with the addresses `enrolled` is so with those that the mesh says too, which go first.
fn covers(enrolled: &[IpAddr], mesh: &[IpAddr]) -> bool {
    let first = |of: &[IpAddr], v4: bool| of.iter().copied().find(|address| address.is_ipv4() == v4);
    let agrees = |v4| first(mesh, v4).is_none_or(|address| first(enrolled, v4) == Some(address));
    agrees(true) && agrees(false) && mesh.iter().all(|address| enrolled.contains(address))
}

/// The workload with the addresses that its namespace has: those that the mesh says go first. What the mesh says besides
/// was true of a namespace that it had before.
pub(super) fn with_addresses(workload: &Arc<Workload>, inside: &[IpAddr]) -> Arc<Workload> {
    let (known, new): (Vec<IpAddr>, Vec<IpAddr>) =
        inside.iter().partition(|&address| workload.addresses.contains(address));
    let known = workload
        .addresses
        .iter()
        .copied()
        .filter(|address| known.contains(address));
    let addresses: Vec<IpAddr> = known.chain(new).collect();
    if addresses == workload.addresses {
        return Arc::clone(workload);
    }
    let mut workload = Workload::clone(workload);
    workload.addresses = addresses;
    Arc::new(workload)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Instant;

    use super::*;
    use crate::mesh::{Exclusions, SameNode, test_workload};
    use crate::node::pod_cgroup::FoundNetns;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn enrolled(addresses: &[&str], found: bool) -> Enrolled {
        let path = PathBuf::from("/proc/1/ns/net");
        Enrolled {
            workload: Arc::new(test_workload("shop", "cart", "10.0.0.1")),
            cookie: 1,
            served: true,
            addresses: ips(addresses),
            found: found.then_some(FoundNetns { path, inode: 1 }),
            since: Instant::now(),
            repairs: 0,
        }
    }

    #[test]
    fn a_pod_found_by_its_cgroup_keeps_its_enrolment_when_the_mesh_learns_what_it_has() {
        for (has, mesh, expected) in [
            (&["10.0.0.1", "fd00::1"][..], &["10.0.0.1"][..], Change::None),
            (&["10.0.0.1", "fd00::1"], &["10.0.0.1", "fd00::1"], Change::None),
            (&["10.0.0.1", "fd00::1"], &["fd00::1", "10.0.0.1"], Change::None),
            (&["10.0.0.1"], &[], Change::None),
            (&[], &[], Change::None),
            (&[], &["10.0.0.1"], Change::Addresses),
            (&["10.0.0.1"], &["10.0.0.1", "fd00::1"], Change::Addresses),
            (&["10.0.0.2", "10.0.0.1"], &["10.0.0.1"], Change::Addresses),
        ] {
            let mut now = test_workload("shop", "cart", "10.0.0.1");
            now.addresses = ips(mesh);
            assert_eq!(change(&enrolled(has, true), &now), expected, "{has:?} {mesh:?}");
        }
    }

    #[test]
    fn a_pod_is_enrolled_anew_where_it_is_another_to_the_kernel_or_to_the_store() {
        let same = test_workload("shop", "cart", "10.0.0.1");
        let anew = |change: &dyn Fn(&mut Workload)| {
            let mut now = same.clone();
            change(&mut now);
            super::change(&enrolled(&["10.0.0.1"], false), &now)
        };
        assert_eq!(anew(&|_| {}), Change::None);
        assert_eq!(anew(&|now| now.labels.extend([("a".into(), "b".into())])), Change::None);
        assert_eq!(anew(&|now| now.netns = Some("/run/netns/a".into())), Change::Anew);
        assert_eq!(anew(&|now| now.same_node = SameNode::Encrypted), Change::Anew);
        assert_eq!(anew(&|now| now.addresses = ips(&["10.0.0.2"])), Change::Anew);
        let excluding = |now: &mut Workload| {
            let mut exclusions = Exclusions::default();
            exclusions.annotated("mesh.adit/exclude-inbound-ports", "9090").unwrap();
            now.exclusions = Some(Arc::new(exclusions));
        };
        assert_eq!(anew(&excluding), Change::Exclusions);
        let other = test_workload("shop", "web", "10.0.0.1").identity;
        assert_eq!(anew(&|now| now.identity = other.clone()), Change::Anew);
    }

    #[test]
    fn what_the_mesh_says_goes_before_what_the_namespace_has() {
        let workload = Arc::new(test_workload("shop", "cart", "10.0.0.1"));
        let merged = with_addresses(&workload, &ips(&["10.0.0.9", "10.0.0.1", "fd00::1"]));
        assert_eq!(merged.addresses, ips(&["10.0.0.1", "10.0.0.9", "fd00::1"]));
        assert!(Arc::ptr_eq(&with_addresses(&workload, &ips(&["10.0.0.1"])), &workload));
        for inside in [&[][..], &["10.0.0.2"], &["10.0.0.2", "fd00::1"]] {
            // It had the mesh's in its last sandbox.
            assert_eq!(with_addresses(&workload, &ips(inside)).addresses, ips(inside));
        }
    }
}
