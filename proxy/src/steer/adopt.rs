//! Pods that a process before this one has enrolled.

use std::collections::HashMap;
use std::os::fd::AsFd as _;

use adit_common::{AddrKey, Pod};

use super::error::at;
use super::pins::Pins;
use super::pod::{HeldPod, HeldPods};
use super::{Maps, SteerError, Steering, sys};

impl HeldPods {
    /// Learns from the maps and pins which pods are steered. They stay so until they are claimed or swept.
    pub(super) fn adopted(maps: &Maps, pins: Option<&Pins>) -> Result<Self, SteerError> {
        let at = at("reading the pods that are enrolled already");
        let Some(pins) = pins else {
            return Ok(Self::default());
        };
        let mut extra: HashMap<u64, Vec<AddrKey>> = HashMap::new();
        for key in sys::keys::<AddrKey>(maps.addrs.as_fd()).map_err(at)? {
            extra.entry(key.netns).or_default().push(key);
        }
        let mut pods = Self::default();
        for cookie in sys::keys::<u64>(maps.pods.as_fd()).map_err(at)? {
            let Some(entry) = sys::get::<_, Pod>(maps.pods.as_fd(), &cookie).map_err(at)? else {
                continue;
            };
            if !pods.slots.adopt(entry.slot) {
                // Nothing that Adit wrote. Whose listeners would it lead to?
                tracing::error!("the entry of an enrolled pod (netns {cookie}) has no place of its own; it is removed");
                sys::delete(maps.pods.as_fd(), &cookie).map_err(at)?;
                continue;
            }
            let pod = HeldPod {
                entry,
                extra_addresses: extra.remove(&cookie).unwrap_or_default(),
                exclusions: HashMap::new(),
                lookup: pins.pod(cookie)?,
                program: 0,
                claimed: false,
            };
            pods.by_cookie.insert(cookie, pod);
        }
        // What a process left that was killed half-way.
        for key in extra.into_values().flatten() {
            sys::delete(maps.addrs.as_fd(), &key).map_err(at)?;
        }
        pods.read_exclusions(maps)?;
        for cookie in pins.pods()? {
            if !pods.by_cookie.contains_key(&cookie) {
                if let Some(link) = pins.pod(cookie)? {
                    // Its namespace may be gone, and the link with it.
                    let _ = sys::detach_link(link.as_fd());
                }
                pins.unpin_pod(cookie)?;
            }
        }
        Ok(pods)
    }

    /// Learns what the kernel has been told to leave alone. What it has been told of other pods goes.
    fn read_exclusions(&mut self, maps: &Maps) -> Result<(), SteerError> {
        let mut excluded = maps.excluded_by_pod()?;
        for (cookie, pod) in &mut self.by_cookie {
            pod.exclusions = excluded.remove(cookie).unwrap_or_default();
        }
        for key in excluded.into_values().flat_map(HashMap::into_keys) {
            maps.exclude_no_more(&key)?;
        }
        Ok(())
    }
}

impl Steering {
    /// Learns anew what the kernel has been told to leave alone: a successor that did not get as far as to serve may have
    /// changed it.
    pub fn reread_exclusions(&self) -> Result<(), SteerError> {
        self.held_pods().read_exclusions(&self.maps)
    }

    /// Lets go the pods that a process before this one has enrolled and that this one has not claimed: those whose
    /// namespace is gone, and those that have left the mesh, as `has_left` tells by the namespace's cookie. The others
    /// stay captured, and are refused. Returns how many were let go.
    pub fn sweep_adopted(&self, has_left: impl Fn(u64) -> bool) -> usize {
        let mut pods = self.held_pods();
        let is_gone = |pod: &HeldPod| {
            let link = pod.lookup.as_ref();
            link.is_some_and(|link| sys::link_info(link.as_fd()).is_ok_and(|info| info.netns == 0))
        };
        let unclaimed: Vec<(u64, bool)> = pods
            .by_cookie
            .iter()
            .filter(|(_, pod)| !pod.claimed)
            .map(|(cookie, pod)| (*cookie, is_gone(pod)))
            .filter(|(cookie, is_gone)| *is_gone || has_left(*cookie))
            .collect();
        for (cookie, is_gone) in &unclaimed {
            // From now on they connect as any pod outside the mesh.
            if !is_gone && let Err(error) = self.namespaces().add_other(*cookie) {
                tracing::warn!("{error}; until it is looked at again, its connects are those of a pod that starts");
            }
            self.release_held(&mut pods, *cookie);
        }
        unclaimed.len()
    }

    /// Removes what versions with another layout have left. For when each pod that the mesh wants is steered by this
    /// one: until then the others are in charge, or keep pods closed.
    pub fn remove_other_versions(&self) -> Result<usize, SteerError> {
        self.pins.as_ref().map_or(Ok(0), Pins::remove_other_versions)
    }
}
