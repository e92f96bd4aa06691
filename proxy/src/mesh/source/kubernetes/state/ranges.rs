//! Where the cluster's addresses lie.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{State, View};

impl State {
    /// Says where the cluster's addresses lie: as the settings say, and the nodes and the API do. Where an address is known
    /// that lies elsewhere, they do not tell all, and nothing is said: what nobody knows is then asked of the proxy.
    pub(super) fn remake_ranges(&mut self) {
        if self.view == View::Authority {
            return;
        }
        let mut ranges = self.settings.cluster_ranges.clone();
        ranges.extend(self.nodes.values().flat_map(|node| &node.value));
        ranges.extend(self.service_ranges.values().flat_map(|kept| &kept.value));
        let ranges = IpNet::aggregate(&ranges);
        let of_pods = self.pods.iter().flat_map(|pod| &pod.workload.addresses);
        let of_services = self.services.values().flat_map(|kept| &kept.value.addresses);
        let stray = of_pods
            .chain(of_services)
            .find(|address| !contains(&ranges, address))
            .copied();
        // Which of several it is, is nobody's concern.
        if stray.is_some() != self.stray.is_some() {
            match stray {
                Some(address) if ranges.is_empty() => tracing::info!(
                    "where the cluster's addresses lie is not known; --cluster-ranges can tell ({address} is one)"
                ),
                Some(address) => tracing::warn!(
                    "{address} is not where the cluster's addresses lie by nodes, service ranges and --cluster-ranges; as if \
                     nothing were known of that, all unknown addresses are looked at by the proxy"
                ),
                None => tracing::info!("all addresses are where the cluster's addresses lie"),
            }
        }
        self.stray = stray;
        let ranges = if stray.is_some() { Vec::new() } else { ranges };
        if *self.mesh.cluster_ranges() != ranges {
            self.mesh.set_cluster_ranges(ranges);
        }
    }

    /// Notes that what had these addresses has those by now.
    pub(super) fn forget_addresses(&mut self, had: &[IpAddr], has: &[IpAddr]) {
        if self
            .stray
            .is_some_and(|stray| had.contains(&stray) && !has.contains(&stray))
        {
            self.stale.ranges = true;
            self.stale.any = true;
        }
    }

    /// Notes that an address is the cluster's.
    pub(super) fn note_address(&mut self, address: &IpAddr) {
        if self.stray.is_none() && !contains(self.mesh.cluster_ranges(), address) {
            self.stale.ranges = true;
            self.stale.any = true;
        }
    }
}

fn contains(ranges: &[IpNet], address: &IpAddr) -> bool {
    ranges.iter().any(|range| range.contains(address))
}
