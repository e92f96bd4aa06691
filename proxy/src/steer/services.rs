//! The endpoints of services, from which the kernel chooses.

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use adit_common::{Endpoint, EndpointKey, EndpointList, ServiceKey};

use super::error::at;
use super::{Maps, SteerError, sys};

/// The maps of services and endpoints.
#[derive(Clone)]
pub struct ServiceMaps {
    maps: Arc<Maps>,
}

impl ServiceMaps {
    pub(super) fn new(maps: Arc<Maps>) -> Self {
        Self { maps }
    }

    /// Names the list of endpoints that a port leads to, in the place of another at once.
    pub fn set_list(&self, service: ServiceKey, list: EndpointList) -> Result<(), SteerError> {
        sys::update(self.maps.services.as_fd(), &service, &list, 0).map_err(at("entering a service"))
    }

    /// Forgets a port: it is asked.
    pub fn remove_list(&self, service: ServiceKey) -> Result<(), SteerError> {
        sys::delete(self.maps.services.as_fd(), &service).map_err(at("removing a service"))
    }

    /// Enters an endpoint in a list.
    pub fn set_endpoint(&self, key: EndpointKey, endpoint: Endpoint) -> Result<(), SteerError> {
        sys::update(self.maps.endpoints.as_fd(), &key, &endpoint, 0).map_err(at("entering an endpoint"))
    }

    /// Removes an endpoint of a list.
    pub fn remove_endpoint(&self, key: EndpointKey) -> Result<(), SteerError> {
        sys::delete(self.maps.endpoints.as_fd(), &key).map_err(at("removing an endpoint"))
    }

    /// The ports that the kernel knows.
    pub fn lists(&self) -> Result<HashMap<ServiceKey, EndpointList>, SteerError> {
        sys::entries(self.maps.services.as_fd()).map_err(at("reading services"))
    }

    /// The endpoints that the kernel knows.
    pub fn endpoints(&self) -> Result<HashMap<EndpointKey, Endpoint>, SteerError> {
        sys::entries(self.maps.endpoints.as_fd()).map_err(at("reading endpoints"))
    }
}
