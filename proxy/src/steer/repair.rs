//! Whether everything is where it was put; what is not is put there again.

use std::os::fd::AsFd as _;
use std::sync::PoisonError;

use adit_common::Pod;

use super::error::at;
use super::{SteerError, Steering, sys};

/// What was not as it should be.
#[derive(Debug, Default)]
pub struct Repairs {
    /// What has been put right, in words.
    pub done: Vec<String>,
    /// The cookies of pods that have to be attached anew.
    pub pods: Vec<u64>,
}

impl Steering {
    /// Looks whether programs, pins and pods' entries are in place, and puts right what is not. Pods whose socket lookup
    /// or entry is gone are for the caller, who has their namespaces.
    ///
    /// # Errors
    ///
    /// Something could not be put right.
    pub fn repair(&self) -> Result<Repairs, SteerError> {
        let mut repairs = Repairs::default();
        if let Some(pins) = &self.pins {
            pins.ensure_folders()?;
            let lookup = self.lookup.lock().unwrap_or_else(PoisonError::into_inner);
            for (name, map) in lookup.pinned_maps() {
                if pins.ensure_map(name, map)? {
                    repairs.done.push(format!("the map {name} was not pinned"));
                }
            }
        }
        self.maps.enter_own_cgroup()?;
        if let Err(error) = self.sweep_proxies() {
            tracing::debug!("{error}");
        }
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let put = self.programs.put(&self.pods_cgroup, &mut links, self.pins.as_ref())?;
        repairs.done.extend(put);
        drop(links);
        let pods = self.held_pods();
        for (cookie, pod) in pods.by_cookie.iter().filter(|(_, pod)| pod.claimed) {
            let entry: Option<Pod> = sys::get(self.maps.pods.as_fd(), cookie).map_err(at("looking for a pod"))?;
            let link = pod.lookup.as_ref();
            let attached = link.is_some_and(|link| {
                sys::link_info(link.as_fd()).is_ok_and(|info| info.netns != 0 && info.program == pod.program)
            });
            if entry != Some(pod.entry) || !attached {
                repairs.pods.push(*cookie);
                continue;
            }
            if let (Some(pins), Some(link)) = (&self.pins, link)
                && pins.ensure_pod(*cookie, link)?
            {
                repairs.done.push(format!(
                    "the socket lookup of the pod with netns {cookie} was not pinned"
                ));
            }
        }
        Ok(repairs)
    }
}
