//! Pods that are born again: a new network namespace of the same name and addresses, and a new cgroup.

use std::fs;

use anyhow::Context;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::remote::Running;
use super::topology::{self, PodLink};
use super::{Bed, Pod, netns};
use crate::sys::Place;

/// A pod that has just been born: nothing runs in it yet.
#[derive(Debug)]
pub struct Newborn {
    name: String,
    place: Place,
}

impl Newborn {
    /// Starts `work` as the pod's first process.
    pub fn spawn<T>(&self, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<Running<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        Running::start(&self.name, &self.place, |_| work())
    }
}

impl Bed {
    /// Lets all pods of a node be born again, as the `generation`th time. What runs in them is to have ended; the old
    /// ones are gone when this returns.
    pub fn rebirth(&self, node: &str, generation: usize) -> anyhow::Result<Vec<Newborn>> {
        let number = self.nodes.iter().position(|known| known.name() == node);
        let number = u8::try_from(1 + number.with_context(|| format!("no node {node}"))?)?;
        let pods: Vec<&Pod> = self.pods.iter().filter(|pod| pod.node() == node).collect();
        let script = |line: &dyn Fn(usize, &Pod) -> String| -> String {
            pods.iter().enumerate().map(|(index, pod)| line(index, pod)).collect()
        };
        let links = &self.node(node).netns;
        netns::ip(Some(links), &script(&|index, _| format!("link delete pod{index}\n")))?;
        netns::ip(
            None,
            &script(&|_, pod| format!("netns delete {0}\nnetns add {0}\n", pod.netns)),
        )?;
        for pod in &pods {
            netns::inside(&pod.netns(), || netns::set_sysctls(topology::SYSCTLS))??;
        }
        let link = |index: usize, pod: &Pod| {
            format!(
                "link add pod{index} type veth peer name eth0 netns {}\nlink set pod{index} master pods0 up\n",
                pod.netns
            )
        };
        let flush = "neighbour flush dev pods0\n";
        netns::ip(Some(links), &(script(&link) + flush))?;
        let born = pods.into_iter().map(|pod| {
            let host = pod.v4().octets()[3];
            let hosts = u8::try_from(pod.v4.len())?;
            let link = PodLink {
                netns: &pod.netns,
                first_host: host,
                hosts,
            };
            netns::ip(
                Some(&pod.netns),
                &topology::pod_script(number, &link, !pod.v6.is_empty()),
            )?;
            let pods = self.node(node).pods_cgroup();
            // A pod that its kubelet knows by its uid has the same cgroup, and another container in it.
            let cgroup = match &pod.spec.cgroup {
                Some(cgroup) => pods.join(cgroup).join(format!("container-{generation}")),
                None => pods.join(format!("{}-{generation}", pod.name())),
            };
            fs::create_dir(&cgroup).with_context(|| format!("make cgroup {}", cgroup.display()))?;
            Ok(Newborn {
                name: pod.name().to_owned(),
                place: Place::open(&pod.netns(), &cgroup)?,
            })
        });
        born.collect()
    }
}
