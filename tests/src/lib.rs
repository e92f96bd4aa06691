//! The test bed: nodes and pods as network namespaces and cgroups of this machine, joined by links, with the real
//! programs running in them; and what tests do inside such a pod.
//!
//! A test reads as a story: lay out a [`bed`], run code in its pods, assert what both ends saw.

pub mod bed;
pub mod bench;
pub mod ca_call;
pub mod cluster;
pub mod demo;
pub mod net;
mod sys;
pub mod tool;
