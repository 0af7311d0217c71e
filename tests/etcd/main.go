// Command etcd is the server of the release that go.mod names: scripts/etcd.sh builds it for the tests.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
