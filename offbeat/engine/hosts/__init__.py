"""Workers on other machines, which dial out to a store on this one."""
