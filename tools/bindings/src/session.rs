//! A client that attaches anew in a forked child.

use crate::process::{PerProcess, runtime};
use larder_client::{Client, ClientOptions, StoreUrl};
use larder_format::{NamespaceDescriptor, PageGeometry};
use std::io;

/// A store client of one namespace, with what it takes to attach again.
pub struct Session {
    url: StoreUrl,
    namespace: NamespaceDescriptor,
    options: ClientOptions,
    attached: PerProcess<Client>,
}

fn attach(url: &StoreUrl, namespace: &NamespaceDescriptor, options: &ClientOptions) -> io::Result<PerProcess<Client>> {
    let _context = runtime()?.enter();
    Ok(PerProcess::new(Client::attach(url.clone(), Some(namespace.clone()), options.clone())))
}

impl Session {
    /// Attaches without waiting for a connection. Fails if the runtime cannot start.
    pub fn new(url: StoreUrl, namespace: NamespaceDescriptor, options: ClientOptions) -> io::Result<Session> {
        let attached = attach(&url, &namespace, &options)?;
        Ok(Session { url, namespace, options, attached })
    }

    /// The client of this process. A forked child attaches anew.
    pub fn attached(&mut self) -> io::Result<Client> {
        if let Some(client) = self.attached.get() {
            return Ok(client.clone());
        }
        self.attached = attach(&self.url, &self.namespace, &self.options)?;
        self.attached.get().cloned().ok_or_else(|| io::Error::other("the process changed its id"))
    }

    pub fn namespace(&self) -> &NamespaceDescriptor {
        &self.namespace
    }

    pub fn geometry(&self) -> &PageGeometry {
        &self.namespace.geometry
    }
}
