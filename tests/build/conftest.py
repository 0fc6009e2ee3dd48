def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes long; needs the network and a compiler")
