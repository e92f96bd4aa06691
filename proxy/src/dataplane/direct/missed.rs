//! What of direct connections and refusals the kernel could not tell in time, and how it is found again.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use adit_common::RefusalKind;

use super::DirectConnections;
use super::ending::state;
use crate::node::LocalPod;
use crate::steer::{Losses, SockDiag, SteerError, monotonic_ns};

/// What is known already.
#[derive(Default)]
pub(super) struct Missed {
    /// The kernel's counter of late ends, when they were last taken.
    late_ends: Option<u64>,
    /// Those of which no socket was found at the last look.
    gone: HashSet<u64>,
    /// The kernel's counter of untold refusals, and each pod's by its slot, when they were last read.
    untold: Option<u64>,
    untold_of: HashMap<(u32, u32), u64>,
}

impl DirectConnections {
    /// Tells of the ends that the ring had no room for. Returns how many there were. To be called every moment, by the
    /// process that reads the ring.
    pub fn catch_up(&self) -> Result<usize, SteerError> {
        let late = self.open.losses()?.late_ends;
        if self.state().missed.late_ends.replace(late) == Some(late) {
            return Ok(0);
        }
        let ended = self.open.take_ended()?;
        ended.iter().for_each(|end| self.ended(end));
        Ok(ended.len())
    }

    /// Closes the books on those of which no socket is found twice in turn, although the kernel has not told of their
    /// end: the programs were not in their place at the time. Returns how many there were.
    pub fn close_gone(&self) -> Result<usize, SteerError> {
        let pods = self.plane.pods.all();
        let by_netns: HashMap<u64, &Arc<LocalPod>> = pods.values().map(|pod| (pod.netns().cookie(), pod)).collect();
        let mut open: HashMap<u64, Vec<u64>> = HashMap::new();
        for (cookie, direct) in self.open.all()? {
            open.entry(direct.netns).or_default().push(cookie);
        }
        let mut gone = HashSet::new();
        for (netns, recorded) in open {
            // The sockets of a pod that has left keep its namespace, and tell their ends.
            let Some(pod) = by_netns.get(&netns) else { continue };
            let sockets = pod.netns().run(SockDiag::open).map_err(io::Error::other).flatten();
            match sockets.and_then(|diag| diag.cookies()) {
                Ok(there) => gone.extend(recorded.into_iter().filter(|cookie| !there.contains(cookie))),
                Err(error) => tracing::debug!("looking for the sockets of pod {}: {error}", pod.uid()),
            }
        }
        let seen = std::mem::replace(&mut self.state().missed.gone, gone.clone());
        let mut closed = 0;
        for cookie in gone.intersection(&seen) {
            let Some(mut end) = self.open.take(*cookie)? else {
                continue;
            };
            if end.direct.state == 0 {
                end.direct.state = state::GONE;
                end.direct.closed = monotonic_ns();
                self.lost.fetch_add(1, Ordering::Relaxed);
                closed += 1;
            }
            self.ended(&end);
        }
        Ok(closed)
    }

    /// Logs of which pods refusals were not told one by one since the last time.
    pub fn log_untold_refusals(&self) -> Result<(), SteerError> {
        let untold = self.open.losses()?.untold_refusals;
        let first = match self.state().missed.untold.replace(untold) {
            Some(before) if before == untold => return Ok(()),
            before => before.is_none(),
        };
        for pod in self.plane.pods.all().values() {
            for (kind, what) in [
                (RefusalKind::Connect, "connects of"),
                (RefusalKind::Syn, "connections of strangers to"),
            ] {
                let now = self.open.untold_refusals(pod.slot(), kind)?;
                let before = self.state().missed.untold_of.insert((pod.slot(), kind as u32), now);
                let more = now.saturating_sub(before.unwrap_or(0));
                // At first it is not known since when.
                if more > 0 && !first {
                    let workload = pod.workload();
                    tracing::warn!(
                        "{more} further {what} pod {}/{} were refused by policy, and are not in the access log",
                        workload.namespace,
                        workload.name
                    );
                }
            }
        }
        Ok(())
    }

    /// What the kernel could not tell in time or at all.
    pub fn losses(&self) -> Result<Losses, SteerError> {
        self.open.losses()
    }

    /// How many connections this process has found gone without a word of the kernel's.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}
