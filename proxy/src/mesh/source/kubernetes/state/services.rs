//! Services and their slices of endpoints.

use std::sync::Arc;

use super::{Kept, State};
use crate::mesh::source::kubernetes::objects;
use crate::mesh::source::kubernetes::services::{Slice, resolve};

impl State {
    pub(super) fn set_service(&mut self, service: objects::Service, list: u32) {
        let key = self.strings.share(&format!("{}/{}", service.namespace, service.name));
        self.mark_service(&key);
        service.addresses.iter().for_each(|address| self.note_address(address));
        let kept = Kept {
            uid: service.uid.clone(),
            list,
            value: service,
        };
        let addresses = kept.value.addresses.clone();
        if let Some(before) = self.services.insert(key, kept) {
            self.forget_addresses(&before.value.addresses, &addresses);
        }
    }

    pub(super) fn remove_service(&mut self, key: &str) {
        if let Some(before) = self.services.remove(key) {
            self.forget_addresses(&before.value.addresses, &[]);
        }
        let key = self.strings.share(key);
        self.mark_service(&key);
    }

    pub(super) fn set_slice(&mut self, slice: objects::Slice, list: u32) {
        let own = self.strings.share(&format!("{}/{}", slice.namespace, slice.name));
        if slice.service.is_empty() {
            return self.remove_slice(&slice.namespace, &slice.name, None);
        }
        let owner = self.strings.share(&format!("{}/{}", slice.namespace, slice.service));
        if self.slice_owner.get(&own).is_some_and(|known| *known != owner) {
            self.remove_slice(&slice.namespace, &slice.name, None);
        }
        let (name, uid) = (slice.name.clone(), slice.uid.clone());
        let value = Slice::new(slice, &mut self.strings);
        let slices = self.slices.entry(Arc::clone(&owner)).or_default();
        let before = slices.get(&name).map(|known| &known.value);
        let differs = before != Some(&value);
        slices.insert(name, Kept { uid, list, value });
        self.slice_owner.insert(own, Arc::clone(&owner));
        if differs {
            self.mark_service(&owner);
        }
    }

    /// Removes a slice, where it is the one of that uid.
    pub(super) fn remove_slice(&mut self, namespace: &str, name: &str, uid: Option<&str>) {
        let own = format!("{namespace}/{name}");
        let Some(owner) = self.slice_owner.get(own.as_str()).cloned() else {
            return;
        };
        let Some(slices) = self.slices.get_mut(&owner) else {
            return;
        };
        if slices
            .get(name)
            .is_some_and(|known| uid.is_some_and(|uid| known.uid != uid))
        {
            return;
        }
        slices.remove(name);
        if slices.is_empty() {
            self.slices.remove(&owner);
        }
        self.slice_owner.remove(own.as_str());
        self.mark_service(&owner);
    }

    fn mark_service(&mut self, key: &Arc<str>) {
        self.stale.services.insert(Arc::clone(key));
        self.stale.any = true;
    }

    pub(super) fn remake_service(&mut self, key: &Arc<str>) {
        let service = self.services.get(key).filter(|known| !known.value.addresses.is_empty());
        let Some(Kept { value: service, .. }) = service else {
            return self.mesh.remove_service(key);
        };
        let slices = self.slices.get(key).into_iter().flat_map(|slices| slices.values());
        let slices = slices.map(|kept| &kept.value);
        let service = resolve(service, slices, &self.settings.cluster_domain, &mut self.strings);
        if self.mesh.service_by_name(key).is_none_or(|known| **known != service) {
            self.mesh.set_service(&Arc::new(service));
        }
    }
}
